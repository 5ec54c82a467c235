"""Servers that tests start: real ones from wheels (PostgreSQL, NATS), one of our own that speaks Kafka's protocol, and a proxy
that cuts what goes between them and their clients. Each on a port of its own, with its data in a folder, ended by its process
id."""
