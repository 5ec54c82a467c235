"""A job over many hosts on one machine: network namespaces are the hosts, and links between them are cut. `make cluster` runs it;
docs/chaos.md says what it shows."""
