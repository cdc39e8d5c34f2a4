-- Queues: configuration, removal, and the numbers that listings show.

-- A time as answers print it: UTC, milliseconds. Null for null and for the infinities.
CREATE OR REPLACE FUNCTION queen.iso_time(p_at timestamptz)
RETURNS text LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
$$;

-- One option as a number or a truth value, by PostgreSQL's own cast of the JSON text ("90" and "yes" do);
-- the default when it is absent or null. Raises a data exception that names the option.
CREATE OR REPLACE FUNCTION queen.option_int(p_options jsonb, p_key text, p_default int)
RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN coalesce((p_options ->> p_key)::int, p_default);
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = format('option %s: %s', p_key, SQLERRM);
END $$;

CREATE OR REPLACE FUNCTION queen.option_bool(p_options jsonb, p_key text, p_default boolean)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN coalesce((p_options ->> p_key)::boolean, p_default);
EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = format('option %s: %s', p_key, SQLERRM);
END $$;

-- The options of a queue under the names that clients use, without namespace and task.
CREATE OR REPLACE FUNCTION queen.queue_options(q queen.queues)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
        'priority', q.priority, 'leaseTime', q.lease_time, 'retryLimit', q.retry_limit,
        'retryDelay', q.retry_delay, 'maxSize', q.max_queue_size, 'ttl', q.ttl,
        'deadLetterQueue', q.dead_letter_queue, 'dlqAfterMaxRetries', q.dlq_after_max_retries,
        'delayedProcessing', q.delayed_processing, 'windowBuffer', q.window_buffer,
        'retentionSeconds', q.retention_seconds, 'completedRetentionSeconds', q.completed_retention_seconds,
        'retentionEnabled', q.retention_enabled, 'encryptionEnabled', q.encryption_enabled,
        'maxWaitTimeSeconds', q.max_wait_time_seconds, 'minPopWaitTime', q.min_pop_wait_time,
        'dedupWindowSeconds', q.dedup_window_seconds)
$$;

-- Creates a queue or rewrites its configuration. An option that is absent or null gets its default; with
-- p_merge an absent one keeps its value. Merges of one queue take turns on its row.
-- p_encrypts says whether the calling broker can do what encryptionEnabled asks.
-- Returns the answer to the client, with the options in force.
-- Raises a data exception for a value that can't be cast, for a name that is too long, and for encryption
-- that the broker can't do.
CREATE OR REPLACE FUNCTION queen.configure_queue_v1(
    p_queue text, p_options jsonb, p_tenant uuid, p_merge boolean, p_encrypts boolean)
RETURNS json LANGUAGE plpgsql AS $$
DECLARE
    o jsonb := p_options;
    v_row queen.queues;
BEGIN
    IF p_merge THEN
        INSERT INTO queen.queues (tenant_id, name, namespace, task, lease_time)
        VALUES (p_tenant, p_queue, '', '', 300)
        ON CONFLICT (tenant_id, name) DO NOTHING;
        SELECT q.* INTO v_row FROM queen.queues q
         WHERE q.tenant_id = p_tenant AND q.name = p_queue FOR NO KEY UPDATE;
        o := queen.queue_options(v_row)::jsonb
             || jsonb_build_object('namespace', v_row.namespace, 'task', v_row.task) || p_options;
    END IF;
    INSERT INTO queen.queues AS q (
        tenant_id, name, namespace, task, priority, lease_time, retry_limit, retry_delay, max_queue_size, ttl,
        dead_letter_queue, dlq_after_max_retries, delayed_processing, window_buffer, retention_seconds,
        completed_retention_seconds, retention_enabled, encryption_enabled, max_wait_time_seconds,
        min_pop_wait_time, dedup_window_seconds)
    VALUES (
        p_tenant, p_queue, coalesce(o ->> 'namespace', ''), coalesce(o ->> 'task', ''),
        queen.option_int(o, 'priority', 0), queen.option_int(o, 'leaseTime', 300),
        queen.option_int(o, 'retryLimit', 3), queen.option_int(o, 'retryDelay', 1000),
        queen.option_int(o, 'maxSize', 0), queen.option_int(o, 'ttl', 3600),
        queen.option_bool(o, 'deadLetterQueue', true), queen.option_bool(o, 'dlqAfterMaxRetries', true),
        queen.option_int(o, 'delayedProcessing', 0), queen.option_int(o, 'windowBuffer', 0),
        queen.option_int(o, 'retentionSeconds', 0), queen.option_int(o, 'completedRetentionSeconds', 0),
        queen.option_bool(o, 'retentionEnabled', false), queen.option_bool(o, 'encryptionEnabled', false),
        queen.option_int(o, 'maxWaitTimeSeconds', 0),
        least(greatest(queen.option_int(o, 'minPopWaitTime', 0), 0), 60000),
        greatest(queen.option_int(o, 'dedupWindowSeconds', 3600), 0))
    ON CONFLICT (tenant_id, name) DO UPDATE SET
        namespace = EXCLUDED.namespace, task = EXCLUDED.task, priority = EXCLUDED.priority,
        lease_time = EXCLUDED.lease_time, retry_limit = EXCLUDED.retry_limit,
        retry_delay = EXCLUDED.retry_delay, max_queue_size = EXCLUDED.max_queue_size, ttl = EXCLUDED.ttl,
        dead_letter_queue = EXCLUDED.dead_letter_queue,
        dlq_after_max_retries = EXCLUDED.dlq_after_max_retries,
        delayed_processing = EXCLUDED.delayed_processing, window_buffer = EXCLUDED.window_buffer,
        retention_seconds = EXCLUDED.retention_seconds,
        completed_retention_seconds = EXCLUDED.completed_retention_seconds,
        retention_enabled = EXCLUDED.retention_enabled, encryption_enabled = EXCLUDED.encryption_enabled,
        max_wait_time_seconds = EXCLUDED.max_wait_time_seconds, min_pop_wait_time = EXCLUDED.min_pop_wait_time,
        dedup_window_seconds = EXCLUDED.dedup_window_seconds
    RETURNING q.* INTO v_row;
    IF NOT p_encrypts AND queen.option_bool(p_options, 'encryptionEnabled', false) THEN
        -- Rolls the change back: plain text under an encrypted flag is the one thing that must not happen.
        RAISE EXCEPTION 'encryptionEnabled: this broker has no QUEEN_ENCRYPTION_KEY and can''t encrypt payloads'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN json_build_object(
        'configured', true, 'queueId', v_row.id, 'partitionId', NULL, 'queue', v_row.name,
        'namespace', v_row.namespace, 'task', v_row.task, 'storage', 'segments',
        'options', queen.queue_options(v_row));
END $$;

-- Deletes a queue with all it holds, in one transaction. Returns whether it existed.
-- Every row that somebody else may hold is locked in the global order before the cascade, which knows
-- no order: the queue (nobody adds partitions then), its partitions (nobody pushes), its cursors, and what
-- groups are known by.
CREATE OR REPLACE FUNCTION queen.delete_queue_v1(p_queue text, p_tenant uuid)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_queue uuid;
    v_partitions uuid[];
BEGIN
    SELECT q.id INTO v_queue FROM queen.queues q
     WHERE q.tenant_id = p_tenant AND q.name = p_queue FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT coalesce(array_agg(x.id), '{}') INTO v_partitions
      FROM (SELECT p.id FROM queen.log_partitions p WHERE p.queue_id = v_queue ORDER BY p.id FOR UPDATE) x;
    PERFORM 1 FROM queen.log_consumers c WHERE c.partition_id = ANY (v_partitions)
      ORDER BY c.partition_id, c.consumer_group FOR UPDATE;
    PERFORM 1 FROM queen.consumer_groups_metadata m WHERE m.queue_id = v_queue ORDER BY m.id FOR UPDATE;
    PERFORM 1 FROM queen.consumer_watermarks w WHERE w.queue_id = v_queue ORDER BY w.consumer_group FOR UPDATE;
    DELETE FROM queen.log_txns t WHERE t.partition_id = ANY (v_partitions);
    PERFORM 1 FROM queen.log_dlq d WHERE d.partition_id = ANY (v_partitions) ORDER BY d.id FOR UPDATE;
    DELETE FROM queen.log_dlq d WHERE d.partition_id = ANY (v_partitions);
    DELETE FROM queen.queues q WHERE q.id = v_queue;
    RETURN true;
END $$;

-- What the partitions of a queue hold and owe. Without p_group a partition owes what its slowest
-- named group has not completed, or the group-less consumers where no group has a name: one stray
-- group-less pop must not pin the backlog for ever. With p_group it owes what that group has not completed.
-- done is the last offset not owed; processing is what live leases hold, at most pending.
-- Reads partitions and cursors, never a segment.
CREATE OR REPLACE FUNCTION queen.log_backlog_v1(p_queue uuid, p_group text)
RETURNS TABLE (partition_id uuid, name text, created_at timestamptz, done bigint,
               total bigint, pending bigint, processing bigint) LANGUAGE sql STABLE AS $$
    SELECT b.id, b.name, b.created_at, b.done, greatest(b.last_offset - b.log_start + 1, 0),
           greatest(b.last_offset - b.done, 0), least(b.held, greatest(b.last_offset - b.done, 0))
      FROM (SELECT p.id, p.name, p.created_at, p.last_offset, p.log_start,
                   greatest(coalesce(min(c.committed) FILTER (WHERE c.consumer_group <> '__QUEUE_MODE__'),
                                     min(c.committed), -1), p.log_start - 1) AS done,
                   coalesce(sum(c.batch_end - c.committed) FILTER (
                       WHERE c.worker_id IS NOT NULL AND c.lease_expires_at >= now()), 0)::bigint AS held
              FROM queen.log_partitions p
              LEFT JOIN queen.log_consumers c ON c.partition_id = p.id
               AND (p_group IS NULL OR c.consumer_group = p_group)
             WHERE p.queue_id = p_queue
             GROUP BY p.id) b
$$;

-- When the oldest stored message at or after an offset was written, by two key steps; null when none is.
CREATE OR REPLACE FUNCTION queen.log_written_at_v1(p_partition uuid, p_offset bigint)
RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT s.created_at FROM queen.log_segment_at_v1(p_partition, p_offset) s),
                    (SELECT s.created_at FROM queen.log_segments s
                      WHERE s.partition_id = p_partition AND s.base_offset > p_offset
                      ORDER BY s.base_offset LIMIT 1))
$$;

-- The queues of a tenant, newest first. The filters are null when not asked for: exact namespace and
-- task, a part of the name in any case. pending leaves out what is leased.
-- Counts of segments and bytes come from the statistics, since they alone would have to walk every segment.
CREATE OR REPLACE FUNCTION queen.get_queues_v1(
    p_tenant uuid, p_namespace text, p_task text, p_search text, p_limit int, p_offset int)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object('queues', coalesce(json_agg(json_build_object(
               'id', q.id, 'name', q.name, 'namespace', coalesce(q.namespace, ''),
               'task', coalesce(q.task, ''), 'createdAt', queen.iso_time(q.created_at),
               'partitions', b.partitions, 'partitionCount', b.partitions,
               'priority', q.priority, 'leaseTime', q.lease_time, 'retryLimit', q.retry_limit,
               'maxSize', q.max_queue_size, 'encryptionEnabled', q.encryption_enabled,
               'retainedBytes', coalesce(s.retained_bytes, 0),
               'segments', json_build_object('segments', coalesce(s.segment_count, 0), 'messages', b.total),
               'messages', json_build_object('total', b.total, 'pending', b.pending - b.processing,
                                             'processing', b.processing))
           ORDER BY q.created_at DESC, q.id DESC), '[]'))
      FROM (SELECT q.* FROM queen.queues q
             WHERE q.tenant_id = p_tenant AND (p_namespace IS NULL OR q.namespace = p_namespace)
               AND (p_task IS NULL OR q.task = p_task)
               AND (p_search IS NULL OR strpos(lower(q.name), lower(p_search)) > 0)
             ORDER BY q.created_at DESC, q.id DESC LIMIT p_limit OFFSET p_offset) q
      LEFT JOIN queen.stats s ON s.stat_type = 'queue' AND s.stat_key = q.id::text
     CROSS JOIN LATERAL (
           SELECT count(*) AS partitions, coalesce(sum(x.total), 0) AS total,
                  coalesce(sum(x.pending), 0) AS pending, coalesce(sum(x.processing), 0) AS processing
             FROM queen.log_backlog_v1(q.id, NULL) x) b
$$;

-- The counts of one partition, or of several added up, under the names that clients use.
CREATE OR REPLACE FUNCTION queen.message_counts(p_total numeric, p_pending numeric, p_processing numeric,
                                                p_completed numeric, p_dead_letters numeric)
RETURNS json LANGUAGE sql IMMUTABLE AS $$
    SELECT json_build_object('total', coalesce(p_total, 0), 'pending', coalesce(p_pending, 0),
                             'processing', coalesce(p_processing, 0), 'completed', coalesce(p_completed, 0),
                             'failed', NULL, 'deadLetter', coalesce(p_dead_letters, 0))
$$;

-- One queue with its partitions, by name. Null when the tenant has no such queue.
CREATE OR REPLACE FUNCTION queen.get_queue_v2(p_tenant uuid, p_queue text)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
               'id', q.id, 'name', q.name, 'namespace', coalesce(q.namespace, ''),
               'task', coalesce(q.task, ''), 'createdAt', queen.iso_time(q.created_at),
               'partitions', t.partitions, 'totals', t.totals, 'retainedBytes', t.bytes, 'segments', t.segments,
               'options', queen.queue_options(q))
      FROM queen.queues q
     CROSS JOIN LATERAL (
           SELECT coalesce(json_agg(json_build_object(
                      'id', l.partition_id, 'name', l.name, 'createdAt', queen.iso_time(l.created_at),
                      'stats', queen.message_counts(l.total, l.pending, l.processing, l.completed, l.dead),
                      'oldestMessage', queen.iso_time(l.oldest), 'newestMessage', queen.iso_time(l.newest))
                      ORDER BY l.name), '[]') AS partitions,
                  queen.message_counts(sum(l.total), sum(l.pending), sum(l.processing), sum(l.completed),
                                       sum(l.dead)) AS totals,
                  coalesce(sum(l.bytes), 0) AS bytes,
                  json_build_object('segments', coalesce(sum(l.segments), 0),
                                    'messages', coalesce(sum(l.total), 0)) AS segments
             FROM (SELECT b.*, d.dead, greatest(b.total - b.pending - d.dead, 0) AS completed,
                          CASE WHEN b.pending > 0 THEN queen.log_written_at_v1(b.partition_id, b.done + 1)
                          END AS oldest,
                          s.segments, s.bytes, s.newest
                     FROM queen.log_backlog_v1(q.id, NULL) b
                    CROSS JOIN LATERAL (
                          SELECT count(*) AS dead FROM queen.log_dlq x
                           WHERE x.partition_id = b.partition_id) d
                    CROSS JOIN LATERAL (
                          SELECT count(*) AS segments, sum(octet_length(x.blob)) AS bytes,
                                 max(x.created_at) AS newest
                            FROM queen.log_segments x WHERE x.partition_id = b.partition_id) s) l) t
     WHERE q.tenant_id = p_tenant AND q.name = p_queue
$$;

-- How much of a queue is pending, for all groups or (p_group not null) for one; a group without cursor
-- owes all that is stored. Null when the tenant has no such queue.
CREATE OR REPLACE FUNCTION queen.log_queue_depth_v1(p_tenant uuid, p_queue text, p_group text)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
               'queue', q.name, 'group', p_group, 'pending', d.pending, 'partitionsPending', d.lanes_pending,
               'conflation', m.conflates,
               'effectivePending', CASE WHEN m.conflates THEN d.lanes_pending ELSE d.pending END,
               'processing', d.pending - d.ready, 'ready', d.ready, 'partitionsReady', d.lanes_ready,
               'effectiveReady', CASE WHEN m.conflates THEN d.lanes_ready ELSE d.ready END,
               'partitions', d.partitions)
      FROM queen.queues q
     CROSS JOIN LATERAL (
           SELECT coalesce(bool_or(g.conflation), false) AS conflates
             FROM queen.consumer_groups_metadata g
            WHERE g.queue_id = q.id AND g.consumer_group = p_group AND g.partition_name = '') m
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(b.pending), 0) AS pending, coalesce(sum(b.pending - b.processing), 0) AS ready,
                  count(*) FILTER (WHERE b.pending > 0) AS lanes_pending,
                  count(*) FILTER (WHERE b.pending > b.processing) AS lanes_ready,
                  coalesce(json_agg(json_build_object(
                      'partition', b.name, 'pending', b.pending, 'processing', b.processing,
                      'ready', b.pending - b.processing) ORDER BY b.name), '[]') AS partitions
             FROM queen.log_backlog_v1(q.id, p_group) b) d
     WHERE q.tenant_id = p_tenant AND q.name = p_queue
$$;
