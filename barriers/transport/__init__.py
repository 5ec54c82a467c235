"""How frames travel between processes: the port, who may send, and ZeroMQ."""
