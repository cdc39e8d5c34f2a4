-- Retention: what deletes messages, hash rows and partitions. Every step locks one partition, takes a
-- bounded bite off its front and commits; a partition that has nothing to give is not even looked at.

-- What retention deleted, one row for each step that did. A type like __this__ marks bookkeeping that
-- deleted no messages.
CREATE TABLE IF NOT EXISTS queen.retention_history (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    partition_id     uuid NOT NULL,
    messages_deleted bigint NOT NULL,
    retention_type   text NOT NULL,  -- retention, completed_retention, max_wait_time_eviction
    executed_at      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS idx_retention_history_executed_at ON queen.retention_history (executed_at DESC);

-- Partitions that hold no message, by when that began at the latest: what the cleanup looks at.
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_log_partitions_empty
    ON queen.log_partitions (last_write_at, id) WHERE oldest_live_at IS NULL;

-- A page of the partitions whose oldest message has reached an age at which its queue lets it go: by
-- retention_seconds or completed_retention_seconds, or (p_evict) by max_wait_time_seconds. Ordered by queue,
-- age and id, behind p_queue, p_at and p_id, which are null for the first page.
-- Returns with each the cutoffs that its step takes. due tells whether there is something to delete: a
-- message that only the second rule lets go must have been completed by every group. more marks the last of
-- a full page, the place to go on from, which is returned even if it has nothing; the others are not.
-- Walks an index of ages, queue by queue: a partition that is younger, or empty, costs nothing.
CREATE OR REPLACE FUNCTION queen.log_retention_due_v1(
    p_now timestamptz, p_evict boolean, p_queue uuid, p_at timestamptz, p_id uuid, p_limit int)
RETURNS TABLE (queue_id uuid, at timestamptz, partition_id uuid, all_cutoff timestamptz,
               completed_cutoff timestamptz, due boolean, more boolean) LANGUAGE sql STABLE AS $$
    SELECT y.queue_id, y.at, y.id, y.all_cutoff, y.completed_cutoff, y.due, y.more
      FROM (SELECT x.*, row_number() OVER (ORDER BY x.queue_id, x.at, x.id) = p_limit AS more,
                   coalesce(x.at < x.all_cutoff, false)
                   OR coalesce(x.at < x.completed_cutoff
                               AND (SELECT min(c.committed) FROM queen.log_consumers c WHERE c.partition_id = x.id)
                                   >= (SELECT s.end_offset FROM queen.log_segments s
                                        WHERE s.partition_id = x.id AND s.base_offset >= x.log_start
                                        ORDER BY s.base_offset LIMIT 1), false) AS due
              FROM (SELECT q.id AS queue_id, p.at, p.id, p.log_start, q.all_cutoff, q.completed_cutoff
                      FROM (SELECT t.id,
                                   CASE WHEN p_evict AND t.max_wait_time_seconds > 0
                                        THEN p_now - make_interval(secs => t.max_wait_time_seconds)
                                        WHEN NOT p_evict AND t.retention_enabled AND t.retention_seconds > 0
                                        THEN p_now - make_interval(secs => t.retention_seconds) END AS all_cutoff,
                                   CASE WHEN NOT p_evict AND t.retention_enabled AND t.completed_retention_seconds > 0
                                        THEN p_now - make_interval(secs => t.completed_retention_seconds)
                                   END AS completed_cutoff
                              FROM queen.queues t
                             WHERE t.id >= coalesce(p_queue, '00000000-0000-0000-0000-000000000000')
                               AND CASE WHEN p_evict THEN t.max_wait_time_seconds > 0 ELSE t.retention_enabled END
                             ORDER BY t.id) q
                     CROSS JOIN LATERAL (
                           SELECT t.oldest_live_at AS at, t.id, t.log_start FROM queen.log_partitions t
                            WHERE t.queue_id = q.id AND t.oldest_live_at < greatest(q.all_cutoff, q.completed_cutoff)
                              AND (p_queue IS NULL OR q.id <> p_queue OR (t.oldest_live_at, t.id) > (p_at, p_id))
                            ORDER BY t.oldest_live_at, t.id LIMIT p_limit) p
                     ORDER BY q.id, p.at, p.id LIMIT p_limit) x) y
     WHERE y.due OR y.more
     ORDER BY y.queue_id, y.at, y.id
$$;

-- The same for hash rows: partitions whose oldest hash row has left every window it could be asked in, and
-- whose segment is deleted. A hash row is kept as long as its messages are, however old they are: without
-- it, who consumes them late, or once more, could not acknowledge them.
CREATE OR REPLACE FUNCTION queen.log_txns_due_v1(
    p_now timestamptz, p_queue uuid, p_at timestamptz, p_id uuid, p_limit int)
RETURNS TABLE (queue_id uuid, at timestamptz, partition_id uuid, cutoff timestamptz) LANGUAGE sql STABLE AS $$
    SELECT q.id, p.at, p.id, q.cutoff
      FROM (SELECT t.id, p_now - make_interval(secs => greatest(
                       t.dedup_window_seconds, t.completed_retention_seconds, 900)) AS cutoff
              FROM queen.queues t
             WHERE t.id >= coalesce(p_queue, '00000000-0000-0000-0000-000000000000')
             ORDER BY t.id) q
     CROSS JOIN LATERAL (
           SELECT t.oldest_txn_at AS at, t.id FROM queen.log_partitions t
            WHERE t.queue_id = q.id AND t.oldest_txn_at < q.cutoff AND t.txns_start < t.log_start
              AND (p_queue IS NULL OR q.id <> p_queue OR (t.oldest_txn_at, t.id) > (p_at, p_id))
            ORDER BY t.oldest_txn_at, t.id LIMIT p_limit) p
     ORDER BY q.id, p.at, p.id LIMIT p_limit
$$;

-- One step of one partition: deletes at most p_max of its oldest segments, whole ones from the front.
-- Those older than p_all go whoever has still to consume them; those older than p_completed go when every
-- group that has a cursor here has completed them, and where no group has one they stay. A null cutoff
-- turns its rule off. p_type is what the history calls the first rule.
-- Returns how many segments and messages went, and whether nothing more can go now.
-- Locks the partition, since a push allocates under the same lock, and gives up when somebody else keeps it
-- locked for a second. Looks at no more than one batch of index entries, or a first pass over a long backlog
-- would be quadratic.
CREATE OR REPLACE FUNCTION queen.log_delete_front_v1(
    p_partition uuid, p_all timestamptz, p_completed timestamptz, p_type text, p_max int,
    OUT segments int, OUT messages bigint, OUT done boolean) LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    v_start bigint;
    v_horizon bigint;   -- where the segments begin that this step leaves to the next
    v_behind bigint;    -- the boundary if everything before the horizon is old
    v_boundary bigint;
    v_completed bigint;
    v_walk bigint;
    v_last bigint;
    v_type text := p_type;
BEGIN
    segments := 0;
    messages := 0;
    done := true;
    SELECT p.log_start INTO v_start FROM queen.log_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT s.base_offset INTO v_horizon FROM queen.log_segments s
     WHERE s.partition_id = p_partition AND s.base_offset >= v_start
     ORDER BY s.base_offset OFFSET p_max LIMIT 1;
    v_behind := coalesce(v_horizon, (SELECT s.end_offset + 1 FROM queen.log_segments s
                                      WHERE s.partition_id = p_partition AND s.base_offset >= v_start
                                      ORDER BY s.base_offset DESC LIMIT 1), v_start);
    v_boundary := v_start;
    IF p_all IS NOT NULL THEN
        v_boundary := greatest(v_boundary, coalesce((
            SELECT s.base_offset FROM queen.log_segments s
             WHERE s.partition_id = p_partition AND s.base_offset >= v_start AND s.base_offset < v_behind
               AND s.created_at >= p_all
             ORDER BY s.base_offset LIMIT 1), v_behind));
    END IF;
    IF p_completed IS NOT NULL THEN
        SELECT min(c.committed) + 1 INTO v_completed FROM queen.log_consumers c WHERE c.partition_id = p_partition;
        IF v_completed > v_boundary THEN
            v_walk := coalesce((
                SELECT s.base_offset FROM queen.log_segments s
                 WHERE s.partition_id = p_partition AND s.base_offset >= v_start AND s.base_offset < v_behind
                   AND s.created_at >= p_completed
                 ORDER BY s.base_offset LIMIT 1), v_behind);
            IF least(v_completed, v_walk) > v_boundary THEN
                v_boundary := least(v_completed, v_walk);
                v_type := 'completed_retention';
            END IF;
        END IF;
    END IF;
    IF v_boundary <= v_start THEN
        RETURN;
    END IF;
    SELECT max(x.end_offset) INTO v_last
      FROM (SELECT s.end_offset FROM queen.log_segments s
             WHERE s.partition_id = p_partition AND s.base_offset >= v_start AND s.base_offset < v_boundary
               AND s.end_offset < v_boundary
             ORDER BY s.base_offset LIMIT p_max) x;
    IF v_last IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM queen.log_segments s
     WHERE s.partition_id = p_partition AND s.base_offset >= v_start AND s.base_offset <= v_last;
    GET DIAGNOSTICS segments = ROW_COUNT;
    messages := v_last + 1 - v_start;
    UPDATE queen.log_partitions p
       SET log_start = v_last + 1,
           oldest_live_at = (SELECT s.created_at FROM queen.log_segments s
                              WHERE s.partition_id = p_partition AND s.base_offset > v_last
                              ORDER BY s.base_offset LIMIT 1)
     WHERE p.id = p_partition;
    INSERT INTO queen.retention_history (partition_id, messages_deleted, retention_type, executed_at)
    VALUES (p_partition, messages, v_type, clock_timestamp());
    done := v_horizon IS NULL OR v_boundary < v_horizon;
END $$;

-- The two rules of retention, and the eviction of what nobody consumed in time: they return what
-- queen.log_delete_front_v1 does.
CREATE OR REPLACE FUNCTION queen.log_retention_step_v1(
    p_partition uuid, p_all timestamptz, p_completed timestamptz, p_max int,
    OUT segments int, OUT messages bigint, OUT done boolean) LANGUAGE sql AS $$
    SELECT * FROM queen.log_delete_front_v1(p_partition, p_all, p_completed, 'retention', p_max)
$$;

CREATE OR REPLACE FUNCTION queen.log_evict_max_wait_step_v1(
    p_partition uuid, p_cutoff timestamptz, p_max int, OUT segments int, OUT messages bigint, OUT done boolean)
LANGUAGE sql AS $$
    SELECT * FROM queen.log_delete_front_v1(p_partition, p_cutoff, NULL, 'max_wait_time_eviction', p_max)
$$;

-- The same for hash rows: at most p_max, older than the cutoff and below the first message that is left.
-- Under the partition's lock because a push reads txns_start under it.
CREATE OR REPLACE FUNCTION queen.log_txns_purge_step_v1(
    p_partition uuid, p_cutoff timestamptz, p_max int, OUT purged int, OUT done boolean)
LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    v_start bigint;
    v_log_start bigint;
    v_last bigint;
BEGIN
    purged := 0;
    done := true;
    SELECT p.txns_start, p.log_start INTO v_start, v_log_start
      FROM queen.log_partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT max(x.end_offset) INTO v_last
      FROM (SELECT t.end_offset, t.created_at FROM queen.log_txns t
             WHERE t.partition_id = p_partition AND t.base_offset >= v_start AND t.base_offset < v_log_start
             ORDER BY t.base_offset LIMIT p_max) x
     WHERE x.created_at < p_cutoff AND x.end_offset < v_log_start;  -- ages are in the order of the offsets
    IF v_last IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM queen.log_txns t
     WHERE t.partition_id = p_partition AND t.base_offset >= v_start AND t.base_offset <= v_last;
    GET DIAGNOSTICS purged = ROW_COUNT;
    UPDATE queen.log_partitions p
       SET txns_start = v_last + 1,
           oldest_txn_at = (SELECT t.created_at FROM queen.log_txns t
                             WHERE t.partition_id = p_partition AND t.base_offset > v_last
                             ORDER BY t.base_offset LIMIT 1)
     WHERE p.id = p_partition;
    done := purged < p_max;
END $$;

-- Whether a partition may be removed: nothing in it, nobody busy with it, and nobody was since the cutoff;
-- and no transaction id is to be remembered for it. An expired lease does not protect it.
CREATE OR REPLACE FUNCTION queen.log_partition_dead_v1(p_partition uuid, p_cutoff timestamptz)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
                    WHERE p.id = p_partition AND p.created_at < p_cutoff AND p.last_write_at < p_cutoff
                      AND p.last_write_at < clock_timestamp() - make_interval(secs => q.dedup_window_seconds))
       AND NOT EXISTS (SELECT 1 FROM queen.log_segments s WHERE s.partition_id = p_partition)
       AND NOT EXISTS (SELECT 1 FROM queen.log_dlq d WHERE d.partition_id = p_partition)
       AND NOT EXISTS (SELECT 1 FROM queen.log_consumers c
                        WHERE c.partition_id = p_partition
                          AND ((c.batch_end IS NOT NULL
                                AND (c.lease_expires_at IS NULL OR c.lease_expires_at >= clock_timestamp()))
                               OR c.created_at >= p_cutoff OR c.lease_acquired_at >= p_cutoff
                               OR c.lease_expires_at >= p_cutoff))
$$;

-- Removes dead partitions among the next p_max that are empty and were last written before the cutoff,
-- behind p_at and p_id (null for the first).
-- Returns how many of them there were and were removed, and where to go on.
-- Locks partitions and then their cursors in the global order, leaving out partitions that somebody uses;
-- what is decided under the locks counts. A push that comes meanwhile fails and makes the partition anew.
CREATE OR REPLACE FUNCTION queen.log_partition_cleanup_step_v1(
    p_cutoff timestamptz, p_at timestamptz, p_id uuid, p_max int,
    OUT seen int, OUT removed int, OUT at timestamptz, OUT id uuid) LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    v_ids uuid[];
BEGIN
    SELECT count(*), coalesce(array_agg(x.id) FILTER (WHERE queen.log_partition_dead_v1(x.id, p_cutoff)), '{}'),
           max(x.last_write_at), (array_agg(x.id ORDER BY x.last_write_at DESC, x.id DESC))[1]
      INTO seen, v_ids, at, id
      FROM (SELECT p.last_write_at, p.id FROM queen.log_partitions p
             WHERE p.oldest_live_at IS NULL AND p.last_write_at < p_cutoff
               AND (p_id IS NULL OR (p.last_write_at, p.id) > (p_at, p_id))
             ORDER BY p.last_write_at, p.id LIMIT p_max) x;
    removed := 0;
    IF v_ids = '{}' THEN
        RETURN;
    END IF;
    SELECT coalesce(array_agg(x.id), '{}') INTO v_ids
      FROM (SELECT p.id FROM queen.log_partitions p
             WHERE p.id = ANY (v_ids) ORDER BY p.id FOR UPDATE SKIP LOCKED) x;
    PERFORM 1 FROM queen.log_consumers c WHERE c.partition_id = ANY (v_ids)
      ORDER BY c.partition_id, c.consumer_group FOR UPDATE;
    SELECT coalesce(array_agg(u.pid), '{}') INTO v_ids
      FROM unnest(v_ids) AS u (pid) WHERE queen.log_partition_dead_v1(u.pid, p_cutoff);
    DELETE FROM queen.log_txns t WHERE t.partition_id = ANY (v_ids);
    INSERT INTO queen.retention_history (partition_id, messages_deleted, retention_type, executed_at)
    SELECT u.pid, 0, '__partition_deleted__', clock_timestamp() FROM unnest(v_ids) AS u (pid);
    DELETE FROM queen.log_partitions p WHERE p.id = ANY (v_ids);
    GET DIAGNOSTICS removed = ROW_COUNT;
END $$;

-- Sets the ages that retention goes by (when the first message and the first hash row were written) to what
-- they are, in the next p_max partitions by id behind p_after: a safety net, since every writer keeps them.
-- Returns how many were looked at and how many were wrong, and where to go on.
-- Changes a row only if no push and no retention came between: a message pushed meanwhile must not be lost
-- to retention.
CREATE OR REPLACE FUNCTION queen.log_watermark_walk_step_v1(
    p_after uuid, p_max int, OUT seen int, OUT mended int, OUT id uuid) LANGUAGE plpgsql AS $$
BEGIN
    WITH page AS MATERIALIZED (
        SELECT p.id, p.last_offset, p.log_start, p.txns_start, p.oldest_live_at, p.oldest_txn_at,
               (SELECT s.created_at FROM queen.log_segments s
                 WHERE s.partition_id = p.id ORDER BY s.base_offset LIMIT 1) AS live,
               (SELECT t.created_at FROM queen.log_txns t
                 WHERE t.partition_id = p.id ORDER BY t.base_offset LIMIT 1) AS txn
          FROM queen.log_partitions p
         WHERE p.id > coalesce(p_after, '00000000-0000-0000-0000-000000000000')
         ORDER BY p.id LIMIT p_max),
    wrong AS MATERIALIZED (
        SELECT p.id, w.live, w.txn FROM page w JOIN queen.log_partitions p ON p.id = w.id
         WHERE (w.live IS DISTINCT FROM w.oldest_live_at OR w.txn IS DISTINCT FROM w.oldest_txn_at)
         ORDER BY p.id FOR NO KEY UPDATE OF p SKIP LOCKED),
    mend AS (
        UPDATE queen.log_partitions p SET oldest_live_at = w.live, oldest_txn_at = w.txn
          FROM wrong w JOIN page o ON o.id = w.id
         WHERE p.id = w.id AND (p.last_offset, p.log_start, p.txns_start) = (o.last_offset, o.log_start, o.txns_start)
        RETURNING 1)
    SELECT (SELECT count(*) FROM page), (SELECT count(*) FROM mend), (SELECT max(page.id::text)::uuid FROM page)
      INTO seen, mended, id;
END $$;
