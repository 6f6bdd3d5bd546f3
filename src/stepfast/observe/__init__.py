"""Account: what the events say about a job."""
