-- Consumer groups: listings, cursor moves, removal.

-- Announces that cursors of a group were moved backwards in some queues: no write tells of it, so every
-- broker reads these rows and looks for itself. p_partition null means every partition; rows that name
-- different partitions widen to that. Removes what is older than an hour.
-- Comes last in its transaction: it waits for other writers in the order of the queues' names, and the
-- removal doesn't wait at all.
CREATE OR REPLACE FUNCTION queen.hotlist_repair_publish_v1(
    p_tenant uuid, p_queues text[], p_group text, p_partition text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    INSERT INTO queen.hotlist_repairs AS r (tenant_id, queue_name, consumer_group, partition_name, repair_at, reason)
    SELECT p_tenant, u.queue, p_group, p_partition, v_now, p_reason
      FROM unnest(p_queues) AS u (queue)
     ORDER BY u.queue
    ON CONFLICT (tenant_id, queue_name, consumer_group) DO UPDATE
       SET partition_name = CASE WHEN r.partition_name = EXCLUDED.partition_name
                                   OR r.repair_at < v_now - interval '1 hour' THEN EXCLUDED.partition_name END,
           repair_at = EXCLUDED.repair_at, reason = EXCLUDED.reason;
    DELETE FROM queen.hotlist_repairs r
     USING (SELECT o.tenant_id, o.queue_name, o.consumer_group FROM queen.hotlist_repairs o
             WHERE o.repair_at < v_now - interval '1 hour' FOR UPDATE SKIP LOCKED) old
     WHERE (r.tenant_id, r.queue_name, r.consumer_group) = (old.tenant_id, old.queue_name, old.consumer_group);
END $$;

-- Moves a group's cursors in a queue, in one partition or (p_partition null) in all of them, ends their
-- leases and forgets their retries. p_to_end puts a cursor behind the last message, else p_at places it
-- just before the first segment written at or after that time. A partition without cursor gets one.
-- Returns how many partitions there were (0: no such queue or partition), or null when more than 500 of
-- them had no cursor: those 500 have one now, and the caller calls again. Creating a cursor takes an
-- advisory lock of its own, which a pop only tries, and the server's lock table is finite.
CREATE OR REPLACE FUNCTION queen.log_move_cursors_v1(
    p_tenant uuid, p_queue text, p_partition text, p_group text, p_to_end boolean, p_at timestamptz)
RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_queue uuid;
    v_new uuid[];
    v_more boolean;
    v_count int;
BEGIN
    SELECT array_agg(x.id ORDER BY x.id), count(*) > 500 INTO v_new, v_more
      FROM (SELECT p.id FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id
             WHERE q.tenant_id = p_tenant AND q.name = p_queue
               AND (p_partition IS NULL OR p.name = p_partition)
               AND NOT EXISTS (SELECT 1 FROM queen.log_consumers c
                                WHERE c.partition_id = p.id AND c.consumer_group = p_group)
             ORDER BY p.id LIMIT 501) x;
    v_new := coalesce(v_new[1:500], '{}');
    FOR i IN 1 .. cardinality(v_new) LOOP
        PERFORM pg_advisory_xact_lock(hashtextextended(v_new[i]::text || '/' || p_group, 42));
    END LOOP;
    -- Neither queue nor partition may vanish under a cursor that is about to refer to it.
    SELECT q.id INTO v_queue FROM queen.queues q
     WHERE q.tenant_id = p_tenant AND q.name = p_queue FOR KEY SHARE;
    PERFORM 1 FROM queen.log_partitions p WHERE p.id = ANY (v_new) ORDER BY p.id FOR KEY SHARE;

    INSERT INTO queen.log_consumers AS c (partition_id, consumer_group, committed)
    SELECT p.id, p_group, CASE WHEN p_to_end THEN p.last_offset
                               ELSE queen.log_offset_at_v1(p.id, p.log_start, p.last_offset, p_at) END
      FROM queen.log_partitions p
     WHERE p.queue_id = v_queue AND (p_partition IS NULL OR p.name = p_partition)
       AND (p.id = ANY (v_new)
            OR (NOT v_more AND EXISTS (SELECT 1 FROM queen.log_consumers o
                                        WHERE o.partition_id = p.id AND o.consumer_group = p_group)))
     ORDER BY p.id
    ON CONFLICT (partition_id, consumer_group) DO UPDATE
       SET committed = EXCLUDED.committed, batch_end = NULL, worker_id = NULL, lease_expires_at = NULL,
           lease_conflated = false, batch_retry_count = 0, attempt_offset = NULL, attempt_count = 0;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_more THEN
        RETURN NULL;
    END IF;
    IF v_count > 0 THEN
        DELETE FROM queen.consumer_watermarks w WHERE w.queue_id = v_queue AND w.consumer_group = p_group;
        PERFORM queen.hotlist_repair_publish_v1(p_tenant, ARRAY[p_queue], p_group, p_partition, 'seek');
    END IF;
    RETURN v_count;
END $$;

-- Seeks of a whole queue and of one partition. They take, return and raise what queen.log_move_cursors_v1
-- does; p_at is the client's text, and one that is no time raises a data exception.
CREATE OR REPLACE FUNCTION queen.log_seek_consumer_group_v1(
    p_tenant uuid, p_queue text, p_group text, p_to_end boolean, p_at text)
RETURNS int LANGUAGE sql AS $$
    SELECT queen.log_move_cursors_v1(p_tenant, p_queue, NULL, p_group, p_to_end, p_at::timestamptz)
$$;

CREATE OR REPLACE FUNCTION queen.log_seek_partition_v1(
    p_tenant uuid, p_queue text, p_partition text, p_group text, p_to_end boolean, p_at text)
RETURNS int LANGUAGE sql AS $$
    SELECT queen.log_move_cursors_v1(p_tenant, p_queue, p_partition, p_group, p_to_end, p_at::timestamptz)
$$;

-- Forgets when a group last found a queue (null: any queue of the tenant) empty, in the order in which
-- pops remember it.
CREATE OR REPLACE FUNCTION queen.log_forget_watermarks_v1(p_tenant uuid, p_queue text, p_group text)
RETURNS void LANGUAGE sql AS $$
    WITH old AS MATERIALIZED (
        SELECT w.queue_id
          FROM queen.queues q JOIN queen.consumer_watermarks w ON w.queue_id = q.id
         WHERE q.tenant_id = p_tenant AND (p_queue IS NULL OR q.name = p_queue) AND w.consumer_group = p_group
         ORDER BY q.name FOR UPDATE OF w)
    DELETE FROM queen.consumer_watermarks w USING old
     WHERE w.queue_id = old.queue_id AND w.consumer_group = p_group
$$;

-- Deletes the cursors of a group, in one queue or (p_queue null) in all of the tenant, and with
-- p_metadata its registrations; those of a discovery belong to no queue and go only with all of them.
-- The group's next pop is a first contact. Returns how many cursors there were.
CREATE OR REPLACE FUNCTION queen.log_delete_consumer_group_v1(
    p_tenant uuid, p_queue text, p_group text, p_metadata boolean)
RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_partitions uuid[];
    v_queues text[];
BEGIN
    SELECT coalesce(array_agg(x.partition_id), '{}'), coalesce(array_agg(DISTINCT x.name), '{}')
      INTO v_partitions, v_queues
      FROM (SELECT c.partition_id, q.name
              FROM queen.queues q
              JOIN queen.log_partitions p ON p.queue_id = q.id
              JOIN queen.log_consumers c ON c.partition_id = p.id AND c.consumer_group = p_group
             WHERE q.tenant_id = p_tenant AND (p_queue IS NULL OR q.name = p_queue)
             ORDER BY c.partition_id FOR UPDATE OF c) x;
    DELETE FROM queen.log_consumers c WHERE c.partition_id = ANY (v_partitions) AND c.consumer_group = p_group;
    IF p_metadata THEN
        WITH gone AS (
            DELETE FROM queen.consumer_groups_metadata m
             WHERE m.id IN (SELECT o.id FROM queen.consumer_groups_metadata o
                             WHERE o.tenant_id = p_tenant AND o.consumer_group = p_group
                               AND (p_queue IS NULL OR o.queue_id = (
                                    SELECT q.id FROM queen.queues q
                                     WHERE q.tenant_id = p_tenant AND q.name = p_queue))
                             ORDER BY o.id FOR UPDATE)
            RETURNING m.queue_id)
        SELECT v_queues || coalesce(array_agg(q.name::text), '{}') INTO v_queues
          FROM queen.queues q
         WHERE q.id IN (SELECT gone.queue_id FROM gone) AND q.name <> ALL (v_queues);
    END IF;
    PERFORM queen.log_forget_watermarks_v1(p_tenant, p_queue, p_group);
    PERFORM queen.hotlist_repair_publish_v1(p_tenant, v_queues, p_group, NULL, 'delete');
    RETURN cardinality(v_partitions);
END $$;

CREATE OR REPLACE FUNCTION queen.delete_consumer_group_v1(p_tenant uuid, p_group text, p_metadata boolean)
RETURNS int LANGUAGE sql AS $$
    SELECT queen.log_delete_consumer_group_v1(p_tenant, NULL, p_group, p_metadata)
$$;

CREATE OR REPLACE FUNCTION queen.delete_consumer_group_for_queue_v1(
    p_tenant uuid, p_queue text, p_group text, p_metadata boolean)
RETURNS int LANGUAGE sql AS $$
    SELECT queen.log_delete_consumer_group_v1(p_tenant, p_queue, p_group, p_metadata)
$$;

-- Changes where a group starts on partitions it has no cursor in yet; existing cursors stay. p_at is the
-- client's text; one that is no time raises a data exception. Returns how many registrations changed.
CREATE OR REPLACE FUNCTION queen.update_consumer_group_subscription_v1(p_tenant uuid, p_group text, p_at text)
RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
BEGIN
    UPDATE queen.consumer_groups_metadata m SET subscription_timestamp = p_at::timestamptz
     WHERE m.id IN (SELECT o.id FROM queen.consumer_groups_metadata o
                     WHERE o.tenant_id = p_tenant AND o.consumer_group = p_group
                     ORDER BY o.id FOR NO KEY UPDATE);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    PERFORM queen.log_forget_watermarks_v1(p_tenant, NULL, p_group);
    RETURN v_count;
END $$;

-- The cursors of a tenant, of one group or (p_group null) of all, with what each has still to consume:
-- how many positions, since when (null when nothing of it is stored), and the seconds since then.
-- One key step into the segments for each cursor that is behind.
CREATE OR REPLACE FUNCTION queen.log_cursors_v1(p_tenant uuid, p_group text)
RETURNS TABLE (queue_id uuid, queue text, partition_id uuid, partition_name text, consumer_group text,
               worker_id text, leased boolean, total_consumed bigint, lag bigint, oldest timestamptz,
               lag_seconds numeric) LANGUAGE sql STABLE AS $$
    SELECT x.queue_id, x.queue, x.id, x.name, x.consumer_group, x.worker_id, x.leased, x.total_consumed, x.lag,
           o.at, greatest(coalesce(extract(epoch FROM now() - o.at), 0), 0)
      FROM (SELECT q.id AS queue_id, q.name AS queue, p.id, p.name, c.consumer_group, c.worker_id,
                   coalesce(c.worker_id IS NOT NULL AND c.lease_expires_at >= now(), false) AS leased,
                   c.total_consumed, greatest(c.committed, p.log_start - 1) AS done,
                   greatest(p.last_offset - greatest(c.committed, p.log_start - 1), 0) AS lag
              FROM queen.queues q
              JOIN queen.log_partitions p ON p.queue_id = q.id
              JOIN queen.log_consumers c ON c.partition_id = p.id
             WHERE q.tenant_id = p_tenant AND (p_group IS NULL OR c.consumer_group = p_group)) x
     CROSS JOIN LATERAL (
           SELECT CASE WHEN x.lag > 0 THEN queen.log_written_at_v1(x.id, x.done + 1) END AS at
           OFFSET 0) o  -- a fence: the step is taken once, not once for every use
$$;

-- Every group of a tenant on every queue where it has a cursor, by group and queue.
CREATE OR REPLACE FUNCTION queen.get_consumer_groups_v4(p_tenant uuid)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT coalesce(json_agg(json_build_object(
               'name', g.consumer_group, 'topics', json_build_array(g.queue), 'queueName', g.queue,
               'members', g.cursors, 'partitionCursors', g.cursors, 'partitionsWithLag', g.behind,
               'totalLag', g.lag, 'maxTimeLag', g.seconds,
               'state', CASE WHEN g.seconds > 300 THEN 'Lagging' WHEN g.consumed THEN 'Stable' ELSE 'Dead' END,
               'storage', 'segments', 'subscriptionMode', m.subscription_mode,
               'subscriptionTimestamp', queen.iso_time(m.subscription_timestamp),
               'subscriptionCreatedAt', queen.iso_time(m.created_at),
               'conflation', coalesce(m.conflation, false))
           ORDER BY g.consumer_group, g.queue), '[]')
      FROM (SELECT c.queue_id, c.queue, c.consumer_group, count(*) AS cursors,
                   count(*) FILTER (WHERE c.lag > 0) AS behind, sum(c.lag) AS lag,
                   floor(max(c.lag_seconds)) AS seconds, bool_or(c.total_consumed > 0) AS consumed
              FROM queen.log_cursors_v1(p_tenant, NULL) c
             GROUP BY c.queue_id, c.queue, c.consumer_group) g
      LEFT JOIN queen.consumer_groups_metadata m
        ON m.tenant_id = p_tenant AND m.queue_id = g.queue_id AND m.consumer_group = g.consumer_group
       AND m.partition_name = '' AND m.namespace = '' AND m.task = ''
$$;

-- The partitions of a tenant whose oldest unconsumed message has waited for a group for more than some
-- seconds, the longest wait first.
CREATE OR REPLACE FUNCTION queen.get_lagging_partitions_v1(p_tenant uuid, p_seconds int)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT coalesce(json_agg(json_build_object(
               'consumer_group', c.consumer_group, 'queue_name', c.queue, 'partition_name', c.partition_name,
               'partition_id', c.partition_id, 'worker_id', c.worker_id, 'offset_lag', c.lag,
               'time_lag_seconds', floor(c.lag_seconds), 'lag_hours', round(c.lag_seconds / 3600, 2),
               'oldest_unconsumed_at', queen.iso_time(c.oldest), 'last_consumed_at', NULL)
           ORDER BY c.lag_seconds DESC, c.consumer_group, c.queue, c.partition_name), '[]')
      FROM queen.log_cursors_v1(p_tenant, NULL) c
     WHERE c.oldest IS NOT NULL AND c.lag_seconds > p_seconds
$$;

-- A group's cursors: an object of its queues, each with its partitions by name.
CREATE OR REPLACE FUNCTION queen.get_consumer_group_v1(p_tenant uuid, p_group text)
RETURNS json LANGUAGE sql STABLE AS $$
    SELECT coalesce(json_object_agg(g.queue, json_build_object(
               'conflation', coalesce(m.conflation, false), 'partitions', g.partitions) ORDER BY g.queue), '{}')
      FROM (SELECT c.queue_id, c.queue, json_agg(json_build_object(
                       'partition', c.partition_name, 'workerId', c.worker_id, 'lastConsumedAt', NULL,
                       'totalConsumed', c.total_consumed, 'offsetLag', c.lag,
                       'timeLagSeconds', floor(c.lag_seconds), 'leaseActive', c.leased)
                   ORDER BY c.partition_name) AS partitions
              FROM queen.log_cursors_v1(p_tenant, p_group) c
             GROUP BY c.queue_id, c.queue) g
      LEFT JOIN queen.consumer_groups_metadata m
        ON m.tenant_id = p_tenant AND m.queue_id = g.queue_id AND m.consumer_group = p_group
       AND m.partition_name = '' AND m.namespace = '' AND m.task = ''
$$;
