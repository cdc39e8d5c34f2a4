-- Statistics: numbers about queues that are too dear to compute for every question.

-- What every partition holds and owes, as queen.log_backlog_v1 has it for those of one queue, with its dead
-- letters. All of them are asked for, so this reads the tables from end to end and joins them by hash, where
-- going from partition to partition would be a hundred times as much work.
CREATE OR REPLACE FUNCTION queen.log_backlogs_v1()
RETURNS TABLE (queue_id uuid, partition_id uuid, last_offset bigint, log_start bigint, done bigint,
               held bigint, dead bigint) LANGUAGE sql STABLE AS $$
    SELECT p.queue_id, p.id, p.last_offset, p.log_start,
           greatest(coalesce(c.by_named, c.by_any, -1), p.log_start - 1), coalesce(c.held, 0), coalesce(d.dead, 0)
      FROM queen.log_partitions p
      LEFT JOIN (SELECT t.partition_id, min(t.committed) AS by_any,
                        min(t.committed) FILTER (WHERE t.consumer_group <> '__QUEUE_MODE__') AS by_named,
                        (sum(t.batch_end - t.committed) FILTER (
                            WHERE t.worker_id IS NOT NULL AND t.lease_expires_at >= now()))::bigint AS held
                   FROM queen.log_consumers t GROUP BY t.partition_id) c ON c.partition_id = p.id
      LEFT JOIN (SELECT t.partition_id, count(*) AS dead FROM queen.log_dlq t GROUP BY t.partition_id) d
        ON d.partition_id = p.id
$$;

-- Computes the statistics of everything, whoever else asks: callers take the advisory lock 737002 first.
-- Returns what it changed. Rows that would stay as they are stay unwritten, save that of the whole system.
-- Reads partitions and cursors, and of each partition with something pending one segment. Rates need
-- computations three seconds apart, and are 0 otherwise. A queue that is deleted meanwhile is left out.
CREATE OR REPLACE FUNCTION queen.log_refresh_all_stats_v1()
RETURNS json LANGUAGE plpgsql SET enable_seqscan = on SET enable_hashjoin = on SET work_mem = '64MB' AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_before timestamptz := (SELECT s.prev_snapshot_at FROM queen.stats s
                              WHERE s.stat_type = 'system' AND s.stat_key = 'global');
    v_seconds double precision := extract(epoch FROM v_now - v_before);
    v_rated boolean := coalesce(v_seconds >= 3, false);
    v_queues int;
    v_namespaces int;
    v_tasks int;
    v_partitions bigint;
BEGIN
    INSERT INTO queen.stats AS s (
        stat_type, stat_key, queue_id, child_count, total_messages, pending_messages, processing_messages,
        completed_messages, dead_letter_messages, oldest_pending_at, avg_lag_seconds, max_lag_seconds,
        median_lag_seconds, avg_offset_lag, max_offset_lag, prev_total_messages, prev_completed_messages,
        prev_snapshot_at, last_computed_at)
    SELECT 'queue', q.id::text, q.id, coalesce(b.lanes, 0), coalesce(b.total, 0), coalesce(b.pending, 0),
           coalesce(b.processing, 0), coalesce(b.completed, 0), coalesce(b.dead, 0), b.oldest, l.lag, l.lag, l.lag,
           coalesce(b.avg_pending, 0), coalesce(b.max_pending, 0), coalesce(b.total, 0), coalesce(b.completed, 0),
           v_now, v_now
      FROM queen.queues q
      LEFT JOIN (SELECT x.queue_id, count(*) AS lanes, sum(x.total) AS total, sum(x.pending) AS pending,
                        sum(least(x.held, x.pending)) AS processing,
                        sum(greatest(x.total - x.pending - x.dead, 0)) AS completed, sum(x.dead) AS dead,
                        avg(x.pending)::bigint AS avg_pending, max(x.pending) AS max_pending,
                        min(CASE WHEN x.pending > 0 THEN queen.log_written_at_v1(x.partition_id, x.done + 1) END)
                            AS oldest
                   FROM (SELECT y.*, greatest(y.last_offset - y.log_start + 1, 0) AS total,
                                greatest(y.last_offset - y.done, 0) AS pending
                           FROM queen.log_backlogs_v1() y) x
                  GROUP BY x.queue_id) b ON b.queue_id = q.id
     CROSS JOIN LATERAL (SELECT greatest(coalesce(extract(epoch FROM v_now - b.oldest), 0), 0)::bigint AS lag) l
     ORDER BY q.id::text
       FOR KEY SHARE OF q
    ON CONFLICT (stat_type, stat_key) DO UPDATE SET
        child_count = EXCLUDED.child_count, total_messages = EXCLUDED.total_messages,
        pending_messages = EXCLUDED.pending_messages, processing_messages = EXCLUDED.processing_messages,
        completed_messages = EXCLUDED.completed_messages, dead_letter_messages = EXCLUDED.dead_letter_messages,
        oldest_pending_at = EXCLUDED.oldest_pending_at, avg_lag_seconds = EXCLUDED.avg_lag_seconds,
        max_lag_seconds = EXCLUDED.max_lag_seconds, median_lag_seconds = EXCLUDED.median_lag_seconds,
        avg_offset_lag = EXCLUDED.avg_offset_lag, max_offset_lag = EXCLUDED.max_offset_lag,
        ingested_per_second = CASE WHEN v_rated THEN greatest(
            (EXCLUDED.total_messages - s.prev_total_messages) / v_seconds, 0) ELSE 0 END,
        processed_per_second = CASE WHEN v_rated THEN greatest(
            (EXCLUDED.completed_messages - s.prev_completed_messages) / v_seconds, 0) ELSE 0 END,
        prev_total_messages = CASE WHEN v_rated THEN EXCLUDED.total_messages ELSE s.prev_total_messages END,
        prev_completed_messages = CASE WHEN v_rated THEN EXCLUDED.completed_messages
                                       ELSE s.prev_completed_messages END,
        prev_snapshot_at = CASE WHEN v_rated THEN v_now ELSE s.prev_snapshot_at END,
        last_computed_at = v_now
     WHERE (s.child_count, s.total_messages, s.pending_messages, s.processing_messages, s.completed_messages,
            s.dead_letter_messages, s.avg_lag_seconds, s.prev_total_messages, s.prev_completed_messages)
           IS DISTINCT FROM
           (EXCLUDED.child_count, EXCLUDED.total_messages, EXCLUDED.pending_messages, EXCLUDED.processing_messages,
            EXCLUDED.completed_messages, EXCLUDED.dead_letter_messages, EXCLUDED.avg_lag_seconds,
            EXCLUDED.total_messages, EXCLUDED.completed_messages)
        OR s.ingested_per_second <> 0 OR s.processed_per_second <> 0;
    GET DIAGNOSTICS v_queues = ROW_COUNT;
    v_namespaces := queen.stats_roll_up('namespace', v_now);
    v_tasks := queen.stats_roll_up('task', v_now);
    PERFORM queen.stats_roll_up('system', v_now);
    SELECT coalesce(s.child_count, 0) INTO v_partitions FROM queen.stats s
     WHERE s.stat_type = 'system' AND s.stat_key = 'global';
    -- The system's row keeps the time to which all rates refer.
    UPDATE queen.stats s SET prev_snapshot_at = v_now
     WHERE s.stat_type = 'system' AND s.stat_key = 'global' AND (v_rated OR v_before IS NULL);
    RETURN json_build_object(
        'engine', 'segments', 'queuesUpdated', v_queues, 'segPartitions', v_partitions,
        'namespaces', json_build_object('namespacesUpdated', v_namespaces),
        'tasks', json_build_object('tasksUpdated', v_tasks), 'system', json_build_object('systemUpdated', 1),
        'refreshedAt', queen.iso_time(v_now));
END $$;

-- Adds up the rows of queues by namespace or by task, or (p_type 'system') all of them. Returns how many rows
-- changed. A namespace or task without queues loses its row.
CREATE OR REPLACE FUNCTION queen.stats_roll_up(p_type text, p_now timestamptz)
RETURNS int LANGUAGE plpgsql SET enable_seqscan = on SET enable_hashjoin = on AS $$
DECLARE
    v_count int;
BEGIN
    INSERT INTO queen.stats AS s (
        stat_type, stat_key, child_count, total_messages, pending_messages, processing_messages,
        completed_messages, dead_letter_messages, oldest_pending_at, avg_lag_seconds, max_lag_seconds,
        median_lag_seconds, avg_offset_lag, max_offset_lag, ingested_per_second, processed_per_second,
        last_computed_at)
    SELECT p_type, x.key, CASE WHEN p_type = 'system' THEN coalesce(sum(x.child_count), 0) ELSE count(x.queue_id) END,
           coalesce(sum(x.total_messages), 0), coalesce(sum(x.pending_messages), 0),
           coalesce(sum(x.processing_messages), 0), coalesce(sum(x.completed_messages), 0),
           coalesce(sum(x.dead_letter_messages), 0), min(x.oldest_pending_at),
           coalesce(avg(x.avg_lag_seconds), 0)::bigint, coalesce(max(x.max_lag_seconds), 0),
           coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY x.avg_lag_seconds), 0)::bigint,
           coalesce(avg(x.pending_messages), 0)::bigint, coalesce(max(x.pending_messages), 0),
           coalesce(sum(x.ingested_per_second), 0), coalesce(sum(x.processed_per_second), 0), p_now
      FROM (SELECT CASE p_type WHEN 'namespace' THEN q.namespace WHEN 'task' THEN q.task ELSE 'global' END AS key, t.*
              FROM queen.queues q JOIN queen.stats t ON t.stat_type = 'queue' AND t.stat_key = q.id::text
            UNION ALL
            SELECT 'global', (NULL::queen.stats).* WHERE p_type = 'system') x
     WHERE x.key <> ''
     GROUP BY x.key ORDER BY x.key
    ON CONFLICT (stat_type, stat_key) DO UPDATE SET
        child_count = EXCLUDED.child_count, total_messages = EXCLUDED.total_messages,
        pending_messages = EXCLUDED.pending_messages, processing_messages = EXCLUDED.processing_messages,
        completed_messages = EXCLUDED.completed_messages, dead_letter_messages = EXCLUDED.dead_letter_messages,
        oldest_pending_at = EXCLUDED.oldest_pending_at, avg_lag_seconds = EXCLUDED.avg_lag_seconds,
        max_lag_seconds = EXCLUDED.max_lag_seconds, median_lag_seconds = EXCLUDED.median_lag_seconds,
        avg_offset_lag = EXCLUDED.avg_offset_lag, max_offset_lag = EXCLUDED.max_offset_lag,
        ingested_per_second = EXCLUDED.ingested_per_second, processed_per_second = EXCLUDED.processed_per_second,
        last_computed_at = EXCLUDED.last_computed_at
     WHERE p_type = 'system'
        OR (s.child_count, s.total_messages, s.pending_messages, s.processing_messages, s.completed_messages,
            s.dead_letter_messages, s.avg_lag_seconds, s.ingested_per_second, s.processed_per_second)
           IS DISTINCT FROM
           (EXCLUDED.child_count, EXCLUDED.total_messages, EXCLUDED.pending_messages, EXCLUDED.processing_messages,
            EXCLUDED.completed_messages, EXCLUDED.dead_letter_messages, EXCLUDED.avg_lag_seconds,
            EXCLUDED.ingested_per_second, EXCLUDED.processed_per_second);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF p_type <> 'system' THEN
        DELETE FROM queen.stats s
         WHERE s.stat_type = p_type
           AND NOT EXISTS (SELECT 1 FROM queen.queues q
                            WHERE s.stat_key = CASE p_type WHEN 'namespace' THEN q.namespace ELSE q.task END);
    END IF;
    RETURN v_count;
END $$;

-- Adds up the stored segments of each queue and their bytes. Reads every segment's row, not its blob; returns
-- how many queues changed. Callers take the advisory lock 737003 first.
CREATE OR REPLACE FUNCTION queen.log_refresh_retained_bytes_v1()
RETURNS int LANGUAGE plpgsql SET enable_seqscan = on SET enable_hashjoin = on SET work_mem = '64MB' AS $$
DECLARE
    v_count int;
BEGIN
    INSERT INTO queen.stats AS s (stat_type, stat_key, queue_id, retained_bytes, segment_count)
    SELECT 'queue', q.id::text, q.id, coalesce(x.bytes, 0), coalesce(x.segments, 0)
      FROM queen.queues q
      LEFT JOIN (SELECT p.queue_id, sum(octet_length(g.blob)) AS bytes, count(*) AS segments
                   FROM queen.log_segments g JOIN queen.log_partitions p ON p.id = g.partition_id
                  GROUP BY p.queue_id) x ON x.queue_id = q.id
     ORDER BY q.id::text
    ON CONFLICT (stat_type, stat_key) DO UPDATE
       SET retained_bytes = EXCLUDED.retained_bytes, segment_count = EXCLUDED.segment_count
     WHERE (s.retained_bytes, s.segment_count) <> (EXCLUDED.retained_bytes, EXCLUDED.segment_count);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
