"""The mesh: hints between the workers of a broker and between brokers. Losing any of it costs latency only."""
