"""The log engine: push, pop, ack, leases and transactions over the stored operations of queen.db."""
