"""Run the user's script: everything that lives inside a rank, and the zygote."""
