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

-- Adds what a row of queen.worker_metrics brings to the totals.
CREATE OR REPLACE FUNCTION queen.worker_metrics_summarize()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.worker_metrics_summary AS s (
        id, push_request_count, pop_request_count, ack_request_count, transaction_count, push_message_count,
        pop_message_count, ack_message_count, ack_success_count, ack_failed_count, db_error_count, dlq_count)
    VALUES (1, NEW.push_request_count - coalesce(OLD.push_request_count, 0),
            NEW.pop_request_count - coalesce(OLD.pop_request_count, 0),
            NEW.ack_request_count - coalesce(OLD.ack_request_count, 0),
            NEW.transaction_count - coalesce(OLD.transaction_count, 0),
            NEW.push_message_count - coalesce(OLD.push_message_count, 0),
            NEW.pop_message_count - coalesce(OLD.pop_message_count, 0),
            NEW.ack_message_count - coalesce(OLD.ack_message_count, 0),
            NEW.ack_success_count - coalesce(OLD.ack_success_count, 0),
            NEW.ack_failed_count - coalesce(OLD.ack_failed_count, 0),
            NEW.db_error_count - coalesce(OLD.db_error_count, 0),
            NEW.dlq_count - coalesce(OLD.dlq_count, 0))
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
    AFTER INSERT OR UPDATE ON queen.worker_metrics FOR EACH ROW EXECUTE FUNCTION queen.worker_metrics_summarize();

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

-- Takes what one worker measured since it last did. p_worker and p_system are objects with the columns of
-- their tables, p_queues an array of objects with tenant, queue, the columns of queen.queue_lag_metrics, and
-- lag_ms, the sum of the lags. Queues that are gone are left out. Rows of one minute are added up.
-- Queues are locked, in the global order, before the rows that refer to them: who deletes one takes those too.
CREATE OR REPLACE FUNCTION queen.metrics_record_v1(p_worker jsonb, p_system jsonb, p_queues jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_minute timestamptz := date_trunc('minute', clock_timestamp());
BEGIN
    WITH seen AS MATERIALIZED (
        SELECT x.*, q.id, q.name
          FROM jsonb_to_recordset(p_queues) AS x (
               tenant uuid, queue text, pop_count bigint, pop_empty_count bigint, push_request_count bigint,
               push_message_count bigint,
               ack_request_count bigint, ack_success_count bigint, ack_failed_count bigint, transaction_count bigint,
               lag_count bigint, lag_ms bigint, max_lag_ms bigint, parked_count int)
          JOIN queen.queues q ON q.tenant_id = x.tenant AND q.name = x.queue
         ORDER BY q.tenant_id, q.name FOR KEY SHARE OF q SKIP LOCKED),
    parked AS (
        INSERT INTO queen.queue_parked_replica AS r
               (bucket_time, queue_name, hostname, worker_id, tenant_id, parked_count)
        SELECT v_minute, e.name, p_worker ->> 'hostname', (p_worker ->> 'worker_id')::int, e.tenant, e.parked_count
          FROM seen e WHERE e.parked_count > 0 ORDER BY e.name, e.tenant
        ON CONFLICT (bucket_time, queue_name, hostname, worker_id, tenant_id)
        DO UPDATE SET parked_count = greatest(r.parked_count, EXCLUDED.parked_count))
    INSERT INTO queen.queue_lag_metrics AS m (
        bucket_time, queue_id, pop_count, pop_empty_count, push_request_count, push_message_count,
        ack_request_count, ack_success_count, ack_failed_count, transaction_count,
        lag_count, avg_lag_ms, max_lag_ms, parked_count, partition_count)
    SELECT v_minute, e.id, e.pop_count, e.pop_empty_count, e.push_request_count, e.push_message_count,
           e.ack_request_count, e.ack_success_count, e.ack_failed_count, e.transaction_count,
           e.lag_count, e.lag_ms / greatest(e.lag_count, 1), e.max_lag_ms, e.parked_count,
           coalesce((SELECT s.child_count FROM queen.stats s
                      WHERE s.stat_type = 'queue' AND s.stat_key = e.id::text), 0)
      FROM seen e ORDER BY e.id
    ON CONFLICT (bucket_time, queue_id) DO UPDATE SET
        pop_count = m.pop_count + EXCLUDED.pop_count,
        pop_empty_count = m.pop_empty_count + EXCLUDED.pop_empty_count,
        push_request_count = m.push_request_count + EXCLUDED.push_request_count,
        push_message_count = m.push_message_count + EXCLUDED.push_message_count,
        ack_request_count = m.ack_request_count + EXCLUDED.ack_request_count,
        ack_success_count = m.ack_success_count + EXCLUDED.ack_success_count,
        ack_failed_count = m.ack_failed_count + EXCLUDED.ack_failed_count,
        transaction_count = m.transaction_count + EXCLUDED.transaction_count,
        avg_lag_ms = (m.avg_lag_ms * m.lag_count + EXCLUDED.avg_lag_ms * EXCLUDED.lag_count)
                     / greatest(m.lag_count + EXCLUDED.lag_count, 1),
        lag_count = m.lag_count + EXCLUDED.lag_count,
        max_lag_ms = greatest(m.max_lag_ms, EXCLUDED.max_lag_ms),
        parked_count = m.parked_count + EXCLUDED.parked_count, partition_count = EXCLUDED.partition_count;

    INSERT INTO queen.worker_metrics AS w (
        hostname, worker_id, pid, bucket_time, lag_count, avg_lag_ms, max_lag_ms,
        avg_event_loop_lag_ms, max_event_loop_lag_ms, avg_free_slots, min_free_slots, db_connections, jobs_done,
        push_request_count, pop_request_count, ack_request_count, transaction_count, push_message_count,
        pop_message_count, ack_message_count, ack_success_count, ack_failed_count, db_error_count, dlq_count)
    SELECT x.hostname, x.worker_id, x.pid, v_minute, x.lag_count, x.avg_lag_ms, x.max_lag_ms,
           x.avg_event_loop_lag_ms, x.max_event_loop_lag_ms, x.avg_free_slots, x.min_free_slots, x.db_connections,
           x.jobs_done, x.push_request_count, x.pop_request_count, x.ack_request_count, x.transaction_count,
           x.push_message_count, x.pop_message_count, x.ack_message_count, x.ack_success_count, x.ack_failed_count,
           x.db_error_count, x.dlq_count
      FROM jsonb_to_record(p_worker) AS x (
           hostname text, worker_id int, pid int, lag_count bigint, avg_lag_ms bigint, max_lag_ms bigint,
           avg_event_loop_lag_ms int, max_event_loop_lag_ms int, avg_free_slots int, min_free_slots int,
           db_connections int, jobs_done bigint, push_request_count bigint, pop_request_count bigint,
           ack_request_count bigint, transaction_count bigint, push_message_count bigint, pop_message_count bigint,
           ack_message_count bigint, ack_success_count bigint, ack_failed_count bigint, db_error_count bigint,
           dlq_count bigint)
    ON CONFLICT (hostname, worker_id, pid, bucket_time) DO UPDATE SET
        jobs_done = w.jobs_done + EXCLUDED.jobs_done,
        push_request_count = w.push_request_count + EXCLUDED.push_request_count,
        pop_request_count = w.pop_request_count + EXCLUDED.pop_request_count,
        ack_request_count = w.ack_request_count + EXCLUDED.ack_request_count,
        transaction_count = w.transaction_count + EXCLUDED.transaction_count,
        push_message_count = w.push_message_count + EXCLUDED.push_message_count,
        pop_message_count = w.pop_message_count + EXCLUDED.pop_message_count,
        ack_message_count = w.ack_message_count + EXCLUDED.ack_message_count,
        ack_success_count = w.ack_success_count + EXCLUDED.ack_success_count,
        ack_failed_count = w.ack_failed_count + EXCLUDED.ack_failed_count,
        db_error_count = w.db_error_count + EXCLUDED.db_error_count,
        dlq_count = w.dlq_count + EXCLUDED.dlq_count,
        avg_lag_ms = (w.avg_lag_ms * w.lag_count + EXCLUDED.avg_lag_ms * EXCLUDED.lag_count)
                     / greatest(w.lag_count + EXCLUDED.lag_count, 1),
        lag_count = w.lag_count + EXCLUDED.lag_count,
        max_lag_ms = greatest(w.max_lag_ms, EXCLUDED.max_lag_ms),
        avg_event_loop_lag_ms = EXCLUDED.avg_event_loop_lag_ms,
        max_event_loop_lag_ms = greatest(w.max_event_loop_lag_ms, EXCLUDED.max_event_loop_lag_ms),
        avg_free_slots = EXCLUDED.avg_free_slots,
        min_free_slots = least(w.min_free_slots, EXCLUDED.min_free_slots), db_connections = EXCLUDED.db_connections;

    INSERT INTO queen.system_metrics ("timestamp", hostname, port, worker_id, sample_count, metrics)
    SELECT clock_timestamp(), x.hostname, x.port, x.worker_id, x.sample_count, x.metrics
      FROM jsonb_to_record(p_system) AS x (hostname text, port int, worker_id text, sample_count int, metrics jsonb)
    ON CONFLICT ("timestamp", hostname, port, worker_id) DO NOTHING;
END $$;

-- What all workers together did since the database was made, what its queues did in their last minute, and how
-- many dead letters there are: for a monitoring system that asks one of them.
CREATE OR REPLACE FUNCTION queen.metrics_summary_v1()
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
        'totals', (SELECT to_json(s) FROM queen.worker_metrics_summary s WHERE s.id = 1),
        'deadLetters', coalesce((SELECT json_object_agg(d.name, d.count) FROM (
            SELECT q.name, count(*) AS count
              FROM queen.log_dlq l JOIN queen.log_partitions p ON p.id = l.partition_id
              JOIN queen.queues q ON q.id = p.queue_id GROUP BY q.name) d), '{}'),
        'queues', coalesce((SELECT json_agg(to_json(m)) FROM (
            SELECT q.name, sum(x.pop_count) AS pop_count, sum(x.pop_empty_count) AS pop_empty_count,
                   sum(x.push_request_count) AS push_request_count, sum(x.push_message_count) AS push_message_count,
                   sum(x.ack_success_count) AS ack_success_count, sum(x.ack_failed_count) AS ack_failed_count,
                   sum(x.transaction_count) AS transaction_count, sum(x.parked_count) AS parked_count,
                   sum(x.avg_lag_ms * x.lag_count)::bigint / greatest(sum(x.lag_count), 1)::bigint AS avg_lag_ms,
                   max(x.max_lag_ms) AS max_lag_ms,
                   extract(epoch FROM clock_timestamp() - max(x.bucket_time))::bigint AS age_seconds
              FROM (SELECT DISTINCT ON (m.queue_id) m.* FROM queen.queue_lag_metrics m
                     WHERE m.bucket_time > clock_timestamp() - interval '5 minutes'
                     ORDER BY m.queue_id, m.bucket_time DESC) x
              JOIN queen.queues q ON q.id = x.queue_id GROUP BY q.name ORDER BY q.name) m), '[]'))
$$;
