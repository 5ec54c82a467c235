"""What is wrong with a host, a state directory or a network, before a job finds out: each fault with its fix."""
