"""What a broker does on a schedule: retention, statistics, metrics, reconcile."""
