-- Subscriptions: where a group begins, stored once and seeded into cursors.

-- A timestamp a client sent, or null when PostgreSQL can't read it.
CREATE OR REPLACE FUNCTION queen.try_timestamptz(p_text text)
RETURNS timestamptz LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN p_text::timestamptz;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END $$;

-- The `committed` of a cursor that starts at a time: just before the first live segment created at or
-- after it, else the partition's last offset. 'epoch' means the oldest retained message.
CREATE OR REPLACE FUNCTION queen.log_offset_at_v1(p_partition uuid, p_log_start bigint, p_last bigint, p_at timestamptz)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_at <= 'epoch' THEN greatest(p_log_start - 1, -1)
                ELSE coalesce((SELECT s.base_offset - 1 FROM queen.log_segments s
                                WHERE s.partition_id = p_partition AND s.base_offset >= p_log_start
                                  AND s.created_at >= p_at
                                ORDER BY s.base_offset LIMIT 1), p_last) END
$$;

-- Seeds a group's cursor in every partition of a queue that has none, in one set. This is the one hot
-- function that reads a whole queue, so it may plan for that.
CREATE OR REPLACE FUNCTION queen.log_seed_group_v1(p_queue uuid, p_group text, p_mode text, p_at timestamptz)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = on SET enable_hashjoin = on SET work_mem = '64MB' AS $$
BEGIN
    INSERT INTO queen.log_consumers (partition_id, consumer_group, committed)
    SELECT p.id, p_group,
           CASE WHEN p_mode = 'new' THEN p.last_offset
                WHEN p_mode = 'all' THEN greatest(p.log_start - 1, -1)
                ELSE queen.log_offset_at_v1(p.id, p.log_start, p.last_offset, p_at) END
      FROM queen.log_partitions p
     WHERE p.queue_id = p_queue
       AND NOT EXISTS (SELECT 1 FROM queen.log_consumers c  -- the conflict would wait for its update
                        WHERE c.partition_id = p.id AND c.consumer_group = p_group)
     ORDER BY p.id
    ON CONFLICT (partition_id, consumer_group) DO NOTHING;
END $$;

-- Registers a group on a queue and seeds a cursor for every partition the queue has, once: the first
-- caller stores mode and timestamp (p_mode is 'new' or 'all', p_from '' or what the client sent), all
-- later calls change nothing. Creates the queue, since a group may subscribe before the first push.
-- Returns the queue's id.
CREATE OR REPLACE FUNCTION queen.log_register_group_v1(
    p_tenant uuid, p_queue text, p_group text, p_mode text, p_from text)
RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    v_queue uuid;
    v_mode text := CASE WHEN p_mode = 'new' THEN 'new' ELSE 'all' END;
    v_now timestamptz;
    v_at timestamptz;
BEGIN
    SELECT q.id INTO v_queue FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue;
    IF v_queue IS NULL THEN
        INSERT INTO queen.queues (tenant_id, name, namespace, task)
        VALUES (p_tenant, p_queue, split_part(p_queue, '.', 1), split_part(p_queue, '.', 2))
        ON CONFLICT (tenant_id, name) DO NOTHING;
        SELECT q.id INTO v_queue FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue;
    END IF;
    PERFORM 1 FROM queen.consumer_groups_metadata m
      WHERE m.tenant_id = p_tenant AND m.consumer_group = p_group AND m.queue_id = v_queue
        AND m.partition_name = '' AND m.namespace = '' AND m.task = '';
    IF FOUND THEN
        RETURN v_queue;
    END IF;

    -- A push under way may be giving birth to a partition that the seeds below can't see yet, with a time it
    -- read before ours. To have that delivered whole, a subscription from now on goes by the oldest statement.
    v_now := clock_timestamp();
    v_now := least(v_now, (SELECT min(a.xact_start) FROM pg_stat_activity a
                            WHERE a.datname = current_database() AND a.state = 'active'
                              AND a.pid <> pg_backend_pid()));
    v_at := CASE WHEN v_mode = 'new' THEN v_now ELSE 'epoch' END;
    IF p_group = '__QUEUE_MODE__' THEN
        v_mode := 'all';
        v_at := 'epoch';
    ELSIF p_from = 'now' THEN
        v_mode := 'new';
        v_at := v_now;
    ELSIF p_from <> '' THEN
        v_at := queen.try_timestamptz(p_from);
        v_mode := CASE WHEN v_at IS NULL THEN 'new' ELSE 'timestamp' END;
        v_at := coalesce(v_at, v_now);
    END IF;
    INSERT INTO queen.consumer_groups_metadata
           (tenant_id, consumer_group, queue_id, subscription_mode, subscription_timestamp)
    VALUES (p_tenant, p_group, v_queue, v_mode, v_at)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        PERFORM queen.log_seed_group_v1(v_queue, p_group, v_mode, v_at);
    END IF;
    RETURN v_queue;
END $$;

-- Gives a group its first cursor in one partition. A stored registration decides (so a partition born
-- after the subscription delivers all it holds), else the request does. Takes the creation lock only if
-- it is free: waiting here builds chains no deadlock detector breaks. Returns whether a cursor is there.
CREATE OR REPLACE FUNCTION queen.log_seed_cursor_v1(p_partition uuid, p_group text, p_mode text, p_from text)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_part record;
    v_mode text;
    v_at timestamptz;
    v_seed bigint := -1;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(p_partition::text || '/' || p_group, 42)) THEN
        RETURN false;
    END IF;
    SELECT p.queue_id, p.log_start, p.last_offset INTO v_part
      FROM queen.log_partitions p WHERE p.id = p_partition
       FOR KEY SHARE SKIP LOCKED;  -- what the foreign key would wait for, holding other cursors
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF p_group <> '__QUEUE_MODE__' THEN
        SELECT m.subscription_mode, m.subscription_timestamp INTO v_mode, v_at
          FROM queen.consumer_groups_metadata m
         WHERE m.queue_id = v_part.queue_id AND m.consumer_group = p_group
           AND m.partition_name = '' AND m.namespace = '' AND m.task = '';
        IF v_at IS NULL AND p_from NOT IN ('', 'now') THEN
            v_at := queen.try_timestamptz(p_from);
        END IF;
        IF v_at IS NOT NULL THEN
            v_seed := queen.log_offset_at_v1(p_partition, v_part.log_start, v_part.last_offset, v_at);
        ELSIF p_from = 'now' OR (p_from = '' AND p_mode = 'new') THEN
            v_seed := v_part.last_offset;
        END IF;
    END IF;
    INSERT INTO queen.log_consumers (partition_id, consumer_group, committed)
    VALUES (p_partition, p_group, v_seed)
    ON CONFLICT (partition_id, consumer_group) DO NOTHING;
    RETURN true;
END $$;
