-- The plans that come with the proxy. One that an operator has edited stays as it is.
INSERT INTO queen_proxy.plans (
    code, cell_class, max_req_per_sec, req_burst, max_msgs_per_sec, msgs_burst, max_queues,
    max_partitions_per_queue, max_parked_pops, max_payload_bytes, max_batch_items, max_retained_bytes,
    max_retention_seconds, features)
VALUES
    ('free', 'shared', 5, 25, 20, 100, 20, 8, 50, 262144, 1000, 1073741824, 604800,
     '{"kv": true, "timers": true, "ephemeral": true}'),
    ('dev', 'shared', 10, 50, 40, 200, 50, 16, 150, 524288, 2000, 3221225472, 1209600,
     '{"kv": true, "timers": true, "ephemeral": true}'),
    ('pro', 'shared', 50, 200, 200, 800, 200, 32, 1000, 1048576, 5000, 21474836480, 2592000,
     '{"kv": true, "timers": true, "ephemeral": true, "streams": true, "traces": true}'),
    ('dedicated-s', 'dedicated', 200, 800, 600, 2000, 1000, 64, 5000, 4194304, 10000, 214748364800, 7776000,
     '{"kv": true, "timers": true, "ephemeral": true, "streams": true, "traces": true}')
ON CONFLICT (code) DO NOTHING;
