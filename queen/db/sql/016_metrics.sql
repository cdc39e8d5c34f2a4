-- Metrics: what every worker writes of itself once a minute. Their readers add up over workers.

-- What one worker did in a minute, as differences to the minute before.
CREATE TABLE IF NOT EXISTS queen.worker_metrics (
    id                    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    hostname              text NOT NULL,
    worker_id             int NOT NULL,
    pid                   int NOT NULL,
    bucket_time           timestamptz NOT NULL,
    avg_event_loop_lag_ms int NOT NULL DEFAULT 0,
    max_event_loop_lag_ms int NOT NULL DEFAULT 0,
    avg_free_slots        int NOT NULL DEFAULT 0,  -- idle connections
    min_free_slots        int NOT NULL DEFAULT 0,
    db_connections        int NOT NULL DEFAULT 0,  -- connections in use
    avg_job_queue_size    int,                     -- these three have no meaning here
    max_job_queue_size    int,
    backoff_size          int,
    jobs_done             bigint NOT NULL DEFAULT 0,
    push_request_count    bigint NOT NULL DEFAULT 0,
    pop_request_count     bigint NOT NULL DEFAULT 0,
    ack_request_count     bigint NOT NULL DEFAULT 0,
    transaction_count     bigint NOT NULL DEFAULT 0,
    push_message_count    bigint NOT NULL DEFAULT 0,
    pop_message_count     bigint NOT NULL DEFAULT 0,
    ack_message_count     bigint NOT NULL DEFAULT 0,
    ack_success_count     bigint NOT NULL DEFAULT 0,
    ack_failed_count      bigint NOT NULL DEFAULT 0,
    lag_count             bigint NOT NULL DEFAULT 0,
    avg_lag_ms            bigint NOT NULL DEFAULT 0,
    max_lag_ms            bigint NOT NULL DEFAULT 0,
    db_error_count        bigint NOT NULL DEFAULT 0,
    dlq_count             bigint NOT NULL DEFAULT 0,
    created_at            timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS worker_metrics_uk
    ON queen.worker_metrics (hostname, worker_id, pid, bucket_time);
CREATE INDEX IF NOT EXISTS idx_worker_metrics_bucket ON queen.worker_metrics (bucket_time);

-- The totals of all workers since the database was made.
CREATE TABLE IF NOT EXISTS queen.worker_metrics_summary (
    id                  int PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    push_request_count  bigint NOT NULL DEFAULT 0,
    pop_request_count   bigint NOT NULL DEFAULT 0,
    ack_request_count   bigint NOT NULL DEFAULT 0,
    transaction_count   bigint NOT NULL DEFAULT 0,
    push_message_count  bigint NOT NULL DEFAULT 0,
    pop_message_count   bigint NOT NULL DEFAULT 0,
    ack_message_count   bigint NOT NULL DEFAULT 0,
    ack_success_count   bigint NOT NULL DEFAULT 0,
    ack_failed_count    bigint NOT NULL DEFAULT 0,
    db_error_count      bigint NOT NULL DEFAULT 0,
    dlq_count           bigint NOT NULL DEFAULT 0,
    updated_at          timestamptz NOT NULL DEFAULT now()
);

CREATE OR REPLACE FUNCTION queen.worker_metrics_summarize()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.worker_metrics_summary AS s (
        id, push_request_count, pop_request_count, ack_request_count, transaction_count, push_message_count,
        pop_message_count, ack_message_count, ack_success_count, ack_failed_count, db_error_count, dlq_count)
    VALUES (1, NEW.push_request_count, NEW.pop_request_count, NEW.ack_request_count, NEW.transaction_count,
            NEW.push_message_count, NEW.pop_message_count, NEW.ack_message_count, NEW.ack_success_count,
            NEW.ack_failed_count, NEW.db_error_count, NEW.dlq_count)
    ON CONFLICT (id) DO UPDATE SET
        push_request_count = s.push_request_count + EXCLUDED.push_request_count,
        pop_request_count = s.pop_request_count + EXCLUDED.pop_request_count,
        ack_request_count = s.ack_request_count + EXCLUDED.ack_request_count,
        transaction_count = s.transaction_count + EXCLUDED.transaction_count,
        push_message_count = s.push_message_count + EXCLUDED.push_message_count,
        pop_message_count = s.pop_message_count + EXCLUDED.pop_message_count,
        ack_message_count = s.ack_message_count + EXCLUDED.ack_message_count,
        ack_success_count = s.ack_success_count + EXCLUDED.ack_success_count,
        ack_failed_count = s.ack_failed_count + EXCLUDED.ack_failed_count,
        db_error_count = s.db_error_count + EXCLUDED.db_error_count,
        dlq_count = s.dlq_count + EXCLUDED.dlq_count,
        updated_at = clock_timestamp();
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER trg_worker_metrics_summary
    AFTER INSERT ON queen.worker_metrics FOR EACH ROW EXECUTE FUNCTION queen.worker_metrics_summarize();

-- A sample of the process of one worker: an object of figures, each with avg, min, max and last.
CREATE TABLE IF NOT EXISTS queen.system_metrics (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    "timestamp"  timestamptz NOT NULL,
    hostname     text NOT NULL,
    port         int NOT NULL,
    worker_id    text NOT NULL,
    sample_count int NOT NULL DEFAULT 60,
    metrics      jsonb NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS system_metrics_uk
    ON queen.system_metrics ("timestamp", hostname, port, worker_id);

-- What happened to a queue in a minute, added up over workers.
CREATE TABLE IF NOT EXISTS queen.queue_lag_metrics (
    bucket_time        timestamptz NOT NULL,
    queue_id           uuid NOT NULL REFERENCES queen.queues (id) ON DELETE CASCADE,
    pop_count          bigint NOT NULL DEFAULT 0,
    pop_empty_count    bigint NOT NULL DEFAULT 0,
    push_request_count bigint NOT NULL DEFAULT 0,
    push_message_count bigint NOT NULL DEFAULT 0,
    ack_request_count  bigint NOT NULL DEFAULT 0,
    ack_success_count  bigint NOT NULL DEFAULT 0,
    ack_failed_count   bigint NOT NULL DEFAULT 0,
    transaction_count  bigint NOT NULL DEFAULT 0,
    conflated_count    bigint NOT NULL DEFAULT 0,
    partitions_created bigint NOT NULL DEFAULT 0,
    partitions_deleted bigint NOT NULL DEFAULT 0,
    lag_count          bigint NOT NULL DEFAULT 0,
    avg_lag_ms         bigint NOT NULL DEFAULT 0,
    max_lag_ms         bigint NOT NULL DEFAULT 0,
    parked_count       int NOT NULL DEFAULT 0,
    partition_count    int NOT NULL DEFAULT 0,
    PRIMARY KEY (bucket_time, queue_id)
);
CREATE INDEX IF NOT EXISTS idx_queue_lag_metrics_queue ON queen.queue_lag_metrics (queue_id);

-- Long polls parked at one worker, on average over a minute.
CREATE TABLE IF NOT EXISTS queen.queue_parked_replica (
    bucket_time  timestamptz NOT NULL,
    queue_name   text NOT NULL,
    hostname     text NOT NULL,
    worker_id    int NOT NULL,
    tenant_id    uuid NOT NULL,
    parked_count int NOT NULL,
    PRIMARY KEY (bucket_time, queue_name, hostname, worker_id, tenant_id)
);

-- Deletes at most p_max rows older than a time from each table of metrics and from the history of
-- retention. Returns how many.
CREATE OR REPLACE FUNCTION queen.metrics_purge_step_v1(p_before timestamptz, p_max int)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
    v_total bigint := 0;
BEGIN
    DELETE FROM queen.worker_metrics m WHERE m.id IN (
        SELECT o.id FROM queen.worker_metrics o WHERE o.bucket_time < p_before ORDER BY o.bucket_time LIMIT p_max);
    GET DIAGNOSTICS v_total = ROW_COUNT;
    DELETE FROM queen.system_metrics m WHERE m.id IN (
        SELECT o.id FROM queen.system_metrics o WHERE o."timestamp" < p_before ORDER BY o."timestamp" LIMIT p_max);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_total := v_total + v_count;
    DELETE FROM queen.queue_lag_metrics m WHERE (m.bucket_time, m.queue_id) IN (
        SELECT o.bucket_time, o.queue_id FROM queen.queue_lag_metrics o
         WHERE o.bucket_time < p_before ORDER BY o.bucket_time, o.queue_id LIMIT p_max FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_total := v_total + v_count;
    DELETE FROM queen.queue_parked_replica m
     WHERE (m.bucket_time, m.queue_name, m.hostname, m.worker_id, m.tenant_id) IN (
        SELECT o.bucket_time, o.queue_name, o.hostname, o.worker_id, o.tenant_id FROM queen.queue_parked_replica o
         WHERE o.bucket_time < p_before ORDER BY o.bucket_time LIMIT p_max);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    v_total := v_total + v_count;
    DELETE FROM queen.retention_history h WHERE h.id IN (
        SELECT o.id FROM queen.retention_history o WHERE o.executed_at < p_before ORDER BY o.executed_at LIMIT p_max);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_total + v_count;
END $$;
