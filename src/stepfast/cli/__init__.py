"""The door: one subcommand for each process. It reads the command line and the environment."""
