"""Keep state: snapshot slots in shared memory and what they hold."""
