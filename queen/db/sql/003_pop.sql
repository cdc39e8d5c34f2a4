-- Pop: subscriptions, candidates and the claim.

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

-- Claims partitions for one worker: the only place where a lease begins.
-- Takes candidate partitions with their names, in order of preference, a budget of messages over all of
-- them, a cap of partitions (0: none), a lease in seconds (0: the queue's own, else 60), whether to commit
-- at delivery, whether the caller already did the windowBuffer debounce, and the subscription of the
-- request for first contacts. With p_queue the group is registered on that queue before a cursor is made,
-- if it is not registered yet. Without p_mode no cursor is made: such a candidate's verdict is 'contact'.
-- Never waits: a locked or leased cursor is skipped. p_known_from and
-- p_known_to bound the bases of the segments whose frames the caller has at hand, per candidate.
-- Returns one row per chosen segment, in the order of the candidates: where to cut it (first frame and
-- number of frames), its blob (null where the caller has the frames), and the state of its partition after the claim; and one row without
-- segment for each candidate evaluated in vain: verdict 'empty', or 'leased' with the time to look again.
-- Candidates that budget or cap left out have no row.
CREATE OR REPLACE FUNCTION queen.log_claim_v1(
    p_partitions uuid[], p_names text[], p_group text, p_worker text, p_budget int, p_cap int, p_lease int,
    p_auto_ack boolean, p_debounced boolean, p_mode text, p_from text, p_tenant uuid, p_queue text,
    p_known_from bigint[], p_known_to bigint[])
RETURNS TABLE (partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int, take int,
               created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_ids uuid[];           -- cursors locked, in candidate order
    v_committed bigint[];
    v_missing uuid[];
    v_budget int := p_budget;
    v_served int := 0;
    v_row record;
    v_current uuid;
    v_skip boolean;
    v_taken int;
    v_from bigint;
    v_take int;
    c_pid uuid[] := '{}';   -- chosen segments
    c_base bigint[] := '{}';
    c_start int[] := '{}';
    c_take int[] := '{}';
    c_at timestamptz[] := '{}';
    c_part int[] := '{}';   -- position among the partitions served
    s_pid uuid[] := '{}';   -- partitions served
    s_first bigint[] := '{}';
    s_end bigint[] := '{}';
    s_taken int[] := '{}';
    s_last bigint[] := '{}';
    s_lease int[] := '{}';
    v_barren uuid[] := '{}'; -- claimed, nothing taken
BEGIN
    -- Every statement enters its tables by whole keys, through = ANY or through lateral steps that the
    -- planner can't turn around (OFFSET 0): no plan depends on how large a table was when it was made.
    FOR attempt IN 1 .. 2 LOOP
        SELECT array_agg(x.partition_id ORDER BY array_position(p_partitions, x.partition_id)),
               array_agg(x.committed ORDER BY array_position(p_partitions, x.partition_id))
          INTO v_ids, v_committed
          FROM (SELECT c.partition_id, c.committed
                  FROM queen.log_consumers c
                 WHERE c.partition_id = ANY (p_partitions) AND c.consumer_group = p_group
                   AND (c.worker_id IS NULL OR c.lease_expires_at IS NULL OR c.lease_expires_at < v_now)
                 ORDER BY c.partition_id
                   FOR NO KEY UPDATE SKIP LOCKED) x;
        EXIT WHEN attempt = 2 OR cardinality(v_ids) = cardinality(p_partitions);
        SELECT array_agg(u.pid) INTO v_missing
          FROM unnest(p_partitions) AS u (pid)
         WHERE NOT EXISTS (SELECT 1 FROM queen.log_consumers c
                            WHERE c.partition_id = u.pid AND c.consumer_group = p_group OFFSET 0);
        EXIT WHEN v_missing IS NULL;
        EXIT WHEN p_mode IS NULL;
        IF p_queue IS NOT NULL THEN
            PERFORM queen.log_register_group_v1(p_tenant, p_queue, p_group, p_mode, p_from);
        END IF;
        PERFORM queen.log_seed_cursor_v1(u.pid, p_group, p_mode, p_from) FROM unnest(v_missing) AS u (pid);
    END LOOP;

    IF v_ids IS NOT NULL THEN
        FOR v_row IN
            SELECT u.pid, u.committed, s.base_offset AS base, s.end_offset AS fin, s.created_at AS at,
                   p.last_offset AS last, q.delayed_processing AS delay, q.window_buffer AS win, q.lease_time AS lease
              FROM unnest(v_ids, v_committed) WITH ORDINALITY AS u (pid, committed, ord)
             CROSS JOIN LATERAL (SELECT t.queue_id, t.last_offset FROM queen.log_partitions t
                                  WHERE t.id = u.pid OFFSET 0) p
             CROSS JOIN LATERAL (SELECT t.delayed_processing, t.window_buffer, t.lease_time FROM queen.queues t
                                  WHERE t.id = p.queue_id OFFSET 0) q
              LEFT JOIN LATERAL (
                    (SELECT h.* FROM (SELECT g.base_offset, g.end_offset, g.created_at
                                        FROM queen.log_segments g
                                       WHERE g.partition_id = u.pid AND g.base_offset <= u.committed + 1
                                       ORDER BY g.base_offset DESC LIMIT 1) h
                      WHERE h.end_offset > u.committed)
                    UNION ALL
                    (SELECT g.base_offset, g.end_offset, g.created_at
                       FROM queen.log_segments g
                      WHERE g.partition_id = u.pid AND g.base_offset > u.committed + 1
                      ORDER BY g.base_offset LIMIT p_budget)) s ON true
             ORDER BY u.ord, s.base_offset
        LOOP
            IF v_current IS DISTINCT FROM v_row.pid THEN
                EXIT WHEN v_budget <= 0 OR (p_cap > 0 AND v_served >= p_cap);
                v_current := v_row.pid;
                v_taken := 0;
                v_skip := v_row.base IS NULL;
                IF NOT v_skip AND v_row.win > 0 AND NOT p_debounced THEN
                    v_skip := (SELECT g.created_at FROM queen.log_segments g WHERE g.partition_id = v_row.pid
                                ORDER BY g.base_offset DESC LIMIT 1) > v_now - make_interval(secs => v_row.win);
                END IF;
                IF NOT v_skip AND v_row.delay > 0 THEN
                    v_skip := v_row.at > v_now - make_interval(secs => v_row.delay);
                END IF;
                IF v_skip THEN
                    v_barren := v_barren || v_row.pid;
                END IF;
            END IF;
            CONTINUE WHEN v_skip OR v_budget <= 0;
            IF v_row.delay > 0 AND v_row.at > v_now - make_interval(secs => v_row.delay) THEN
                v_skip := true;  -- created_at is monotone: what follows is younger still
                CONTINUE;
            END IF;
            v_from := greatest(v_row.committed + 1, v_row.base);
            v_take := least(v_budget, (v_row.fin - v_from + 1)::int);
            IF v_taken = 0 THEN
                v_served := v_served + 1;
                s_pid := s_pid || v_row.pid;
                s_first := s_first || v_from;
                s_end := s_end || v_from;
                s_taken := s_taken || 0;
                s_last := s_last || v_row.last;
                s_lease := s_lease || CASE WHEN p_lease > 0 THEN p_lease WHEN v_row.lease > 0 THEN v_row.lease ELSE 60 END;
            END IF;
            c_pid := c_pid || v_row.pid;
            c_base := c_base || v_row.base;
            c_start := c_start || (v_from - v_row.base)::int;
            c_take := c_take || v_take;
            c_at := c_at || v_row.at;
            c_part := c_part || v_served;
            v_taken := v_taken + v_take;
            v_budget := v_budget - v_take;
            s_end[v_served] := v_from + v_take - 1;
            s_taken[v_served] := v_taken;
        END LOOP;
    END IF;

    IF v_served > 0 THEN
        IF p_auto_ack THEN
            UPDATE queen.log_consumers c
               SET committed = s_end[array_position(s_pid, c.partition_id)],
                   total_consumed = c.total_consumed + s_taken[array_position(s_pid, c.partition_id)],
                   batch_end = NULL, worker_id = NULL, lease_expires_at = NULL, lease_conflated = false,
                   batch_retry_count = 0, attempt_offset = NULL, attempt_count = 0
             WHERE c.partition_id = ANY (s_pid) AND c.consumer_group = p_group;
        ELSE
            UPDATE queen.log_consumers c
               SET worker_id = p_worker, batch_end = s_end[array_position(s_pid, c.partition_id)],
                   lease_acquired_at = v_now, lease_conflated = false,
                   lease_expires_at = v_now + make_interval(secs => s_lease[array_position(s_pid, c.partition_id)]),
                   attempt_count = CASE WHEN c.attempt_offset = s_first[array_position(s_pid, c.partition_id)]
                                        THEN c.attempt_count + 1 ELSE 1 END,
                   attempt_offset = s_first[array_position(s_pid, c.partition_id)]
             WHERE c.partition_id = ANY (s_pid) AND c.consumer_group = p_group;
        END IF;
        RETURN QUERY
            SELECT p_names[array_position(p_partitions, u.pid)], 'took'::text, u.pid, u.base, u.start, u.take, u.at,
                   s_end[u.part], s_last[u.part],
                   CASE WHEN NOT p_auto_ack THEN v_now + make_interval(secs => s_lease[u.part]) END, g.blob
              FROM unnest(c_pid, c_base, c_start, c_take, c_at, c_part) WITH ORDINALITY
                   AS u (pid, base, start, take, at, part, ord)
              LEFT JOIN LATERAL (SELECT t.blob FROM queen.log_segments t
                                  WHERE t.partition_id = u.pid AND t.base_offset = u.base
                                    AND (u.base BETWEEN p_known_from[array_position(p_partitions, u.pid)]
                                                    AND p_known_to[array_position(p_partitions, u.pid)]) IS NOT TRUE
                                 OFFSET 0) g ON true
             ORDER BY u.ord;
    END IF;

    -- A partition whose every segment is gone must stop looking pending; one whose segments are only
    -- deferred must not.
    IF v_barren <> '{}' THEN
        UPDATE queen.log_consumers c
           SET committed = greatest(c.committed, (SELECT p.last_offset FROM queen.log_partitions p
                                                   WHERE p.id = c.partition_id))
         WHERE c.partition_id = ANY (v_barren) AND c.consumer_group = p_group
           AND c.committed < (SELECT p.last_offset FROM queen.log_partitions p WHERE p.id = c.partition_id)
           AND NOT EXISTS (SELECT 1 FROM queen.log_segments g WHERE g.partition_id = c.partition_id OFFSET 0);
    END IF;

    -- What could not be served: read afresh, without locks. Still pending means somebody holds it, or
    -- it is deferred, and 'empty' would strand it.
    IF v_barren <> '{}' OR v_ids IS NULL OR cardinality(v_ids) < cardinality(p_partitions) THEN
        RETURN QUERY
            SELECT x.name, CASE WHEN x.pid = ANY (v_missing) AND p_mode IS NULL THEN 'contact'
                                WHEN x.pending OR x.held THEN 'leased' ELSE 'empty' END, x.pid, NULL::bigint, NULL::int,
                   NULL::int, NULL::timestamptz, NULL::bigint, x.last_offset,
                   CASE WHEN x.held THEN x.lease_expires_at
                        WHEN x.pending THEN v_now + interval '250 milliseconds' END, NULL::bytea
              FROM (SELECT u.pid, u.name, p.last_offset, c.lease_expires_at,
                           coalesce(c.worker_id IS NOT NULL AND c.lease_expires_at >= v_now, false) AS held,
                           coalesce(p.last_offset > coalesce(c.committed, -1), false) AS pending
                      FROM unnest(p_partitions, p_names) AS u (pid, name)
                      LEFT JOIN LATERAL (SELECT t.last_offset FROM queen.log_partitions t
                                          WHERE t.id = u.pid OFFSET 0) p ON true
                      LEFT JOIN LATERAL (SELECT t.worker_id, t.lease_expires_at, t.committed
                                           FROM queen.log_consumers t
                                          WHERE t.partition_id = u.pid AND t.consumer_group = p_group OFFSET 0) c ON true
                     WHERE u.pid <> ALL (s_pid)
                       AND (u.pid = ANY (v_barren) OR v_ids IS NULL OR u.pid <> ALL (v_ids))) x;
    END IF;
END $$;

-- Claims from candidates that memory proposed, by name, in one queue.
-- Returns the rows of the claim; a name that is no partition is 'empty'.
CREATE OR REPLACE FUNCTION queen.log_pop_list_v1(
    p_tenant uuid, p_queue text, p_candidates text[], p_known_from bigint[], p_known_to bigint[], p_group text,
    p_worker text, p_budget int, p_cap int, p_lease int, p_auto_ack boolean, p_debounced boolean, p_mode text,
    p_from text)
RETURNS TABLE (partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int, take int,
               created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_queue uuid;
    v_ids uuid[];
    v_names text[];
    v_from bigint[];
    v_to bigint[];
BEGIN
    SELECT q.id INTO v_queue FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue;
    SELECT array_agg(p.id ORDER BY u.ord), array_agg(u.name ORDER BY u.ord), array_agg(u.fro ORDER BY u.ord),
           array_agg(u.til ORDER BY u.ord)
      INTO v_ids, v_names, v_from, v_to
      FROM unnest(p_candidates, p_known_from, p_known_to) WITH ORDINALITY AS u (name, fro, til, ord)
     CROSS JOIN LATERAL (SELECT t.id FROM queen.log_partitions t
                          WHERE t.queue_id = v_queue AND t.name = u.name OFFSET 0) p;
    IF v_ids IS NOT NULL THEN
        RETURN QUERY SELECT * FROM queen.log_claim_v1(
            v_ids, v_names, p_group, p_worker, p_budget, p_cap, p_lease, p_auto_ack, p_debounced, p_mode, p_from,
            p_tenant, p_queue, v_from, v_to);
    END IF;
    IF v_ids IS NULL OR cardinality(v_ids) < cardinality(p_candidates) THEN
        RETURN QUERY
            SELECT u.name, 'empty'::text, NULL::uuid, NULL::bigint, NULL::int, NULL::int, NULL::timestamptz,
                   NULL::bigint, NULL::bigint, NULL::timestamptz, NULL::bytea
              FROM unnest(p_candidates) AS u (name)
             WHERE v_names IS NULL OR u.name <> ALL (v_names);
    END IF;
END $$;

-- Several such claims in one transaction. Arrays with one element per pop, except candidates and known
-- runs, which lie one after the other, p_counts of them per pop. A group's first contact, which may have
-- to create rows that others wait for, is left to the single call: its verdict is 'contact'.
-- Returns the rows of the claims, each with the position of its pop, from 1.
CREATE OR REPLACE FUNCTION queen.log_pop_multi_v1(
    p_tenants uuid[], p_queues text[], p_counts int[], p_candidates text[], p_known_from bigint[],
    p_known_to bigint[], p_groups text[], p_workers text[], p_budgets int[], p_caps int[], p_leases int[],
    p_auto_ack int[], p_debounced int[])
RETURNS TABLE (i int, partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int,
               take int, created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_at int := 1;
BEGIN
    FOR k IN 1 .. cardinality(p_queues) LOOP
        RETURN QUERY SELECT k, c.* FROM queen.log_pop_list_v1(
            p_tenants[k], p_queues[k], p_candidates[v_at : v_at + p_counts[k] - 1],
            p_known_from[v_at : v_at + p_counts[k] - 1], p_known_to[v_at : v_at + p_counts[k] - 1], p_groups[k],
            p_workers[k], p_budgets[k], p_caps[k], p_leases[k], p_auto_ack[k] = 1, p_debounced[k] = 1, NULL, NULL) c;
        v_at := v_at + p_counts[k];
    END LOOP;
END $$;

-- Claims one named partition. Creates nothing but the cursor, registers nobody.
CREATE OR REPLACE FUNCTION queen.log_pop_specific_v1(
    p_tenant uuid, p_queue text, p_partition text, p_group text, p_worker text, p_budget int,
    p_lease int, p_auto_ack boolean, p_mode text, p_from text)
RETURNS TABLE (partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int, take int,
               created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_queue uuid;
    v_id uuid;
BEGIN
    SELECT q.id INTO v_queue FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue;
    SELECT p.id INTO v_id FROM queen.log_partitions p WHERE p.queue_id = v_queue AND p.name = p_partition;
    IF v_id IS NOT NULL THEN
        RETURN QUERY SELECT * FROM queen.log_claim_v1(
            ARRAY[v_id], ARRAY[p_partition], p_group, p_worker, p_budget, 1, p_lease, p_auto_ack, false, p_mode,
            p_from, NULL, NULL, NULL, NULL);
    END IF;
END $$;

-- Claims from the candidates of a scan: partitions of the queues that have something for the group and
-- no live lease, in random order, in slices so that a pop never locks far more than it serves.
-- Names carry the queue where several are scanned. Internal to the wildcard and discovery pops.
CREATE OR REPLACE FUNCTION queen.log_pop_scan_v1(
    p_queues uuid[], p_group text, p_worker text, p_budget int, p_cap int,
    p_lease int, p_auto_ack boolean, p_mode text, p_from text)
RETURNS TABLE (partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int, take int,
               created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_limit int := CASE WHEN p_cap <= 0 OR p_cap >= 128 THEN 512
                        ELSE least(greatest(4 * p_cap, 64), 512) END;
    v_slice int := CASE WHEN p_cap <= 0 THEN 64 ELSE 2 * least(p_cap, 32) END;
    v_ids uuid[];
    v_names text[];
    v_at int := 1;
    v_budget int := p_budget;
    v_served int := 0;
    v_queue uuid;
    v_checked timestamptz;
    r record;
    v_last uuid;
BEGIN
    SELECT array_agg(x.id), array_agg(x.name) INTO v_ids, v_names
      FROM (SELECT p.id, p.name
              FROM unnest(p_queues) AS u (queue_id)
              LEFT JOIN queen.consumer_watermarks w ON w.queue_id = u.queue_id AND w.consumer_group = p_group
              JOIN queen.log_partitions p ON p.queue_id = u.queue_id
               AND p.last_write_at >= coalesce(w.last_empty_scan_at, 'epoch') - interval '2 minutes'
              LEFT JOIN queen.log_consumers c ON c.partition_id = p.id AND c.consumer_group = p_group
             WHERE (c.partition_id IS NULL OR p.last_offset > c.committed)
               AND (c.worker_id IS NULL OR c.lease_expires_at IS NULL OR c.lease_expires_at < clock_timestamp())
             ORDER BY random() LIMIT v_limit) x;
    WHILE v_ids IS NOT NULL AND v_at <= array_length(v_ids, 1) AND v_budget > 0
          AND (p_cap <= 0 OR v_served < p_cap) LOOP
        FOR r IN SELECT c.* FROM queen.log_claim_v1(
                v_ids[v_at : v_at + v_slice - 1], v_names[v_at : v_at + v_slice - 1], p_group, p_worker, v_budget,
                CASE WHEN p_cap <= 0 THEN 0 ELSE p_cap - v_served END, p_lease, p_auto_ack, false,
                p_mode, p_from, NULL, NULL, NULL, NULL) c
             WHERE c.verdict = 'took'
        LOOP
            partition_name := r.partition_name;
            verdict := r.verdict;
            partition_id := r.partition_id;
            base_offset := r.base_offset;
            start_frame := r.start_frame;
            take := r.take;
            created_at := r.created_at;
            batch_end := r.batch_end;
            last_offset := r.last_offset;
            until := r.until;
            blob := r.blob;
            RETURN NEXT;
            v_budget := v_budget - r.take;
            IF v_last IS DISTINCT FROM r.partition_id THEN
                v_served := v_served + 1;
                v_last := r.partition_id;
            END IF;
        END LOOP;
        v_at := v_at + v_slice;
    END LOOP;

    -- Nothing at all: remember since when, so that the next scan skips what was not written since.
    IF v_served = 0 THEN
        FOREACH v_queue IN ARRAY p_queues LOOP
            SELECT w.updated_at INTO v_checked FROM queen.consumer_watermarks w
             WHERE w.queue_id = v_queue AND w.consumer_group = p_group;
            CONTINUE WHEN v_checked > clock_timestamp() - interval '30 seconds';
            PERFORM 1 FROM queen.queues q WHERE q.id = v_queue FOR KEY SHARE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;  -- it is being deleted, and a pop never waits
            INSERT INTO queen.consumer_watermarks AS w (queue_id, consumer_group, last_empty_scan_at, updated_at)
            SELECT v_queue, p_group,
                   CASE WHEN EXISTS (
                        SELECT 1 FROM queen.log_partitions p
                          LEFT JOIN queen.log_consumers c ON c.partition_id = p.id AND c.consumer_group = p_group
                         WHERE p.queue_id = v_queue AND (c.partition_id IS NULL OR p.last_offset > c.committed))
                        THEN 'epoch'::timestamptz ELSE now() END, now()
            ON CONFLICT (queue_id, consumer_group) DO UPDATE
               SET last_empty_scan_at = greatest(w.last_empty_scan_at, EXCLUDED.last_empty_scan_at),
                   updated_at = EXCLUDED.updated_at;
        END LOOP;
    END IF;
END $$;

-- Wildcard pop by scan: a group's first pop of a queue (it carries the registration), and every pop
-- when the hot-list is off. Creates the queue if it does not exist.
CREATE OR REPLACE FUNCTION queen.log_pop_wildcard_v1(
    p_tenant uuid, p_queue text, p_group text, p_worker text, p_budget int, p_cap int,
    p_lease int, p_auto_ack boolean, p_mode text, p_from text)
RETURNS TABLE (partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int, take int,
               created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT s.* FROM queen.log_pop_scan_v1(
        ARRAY[queen.log_register_group_v1(p_tenant, p_queue, p_group, p_mode, p_from)],
        p_group, p_worker, p_budget, p_cap, p_lease, p_auto_ack, p_mode, p_from) s;
END $$;

-- Discovery pop: every queue of the tenant with this namespace and task ('' matches any).
-- Registers the group on each of them; creates no queue.
CREATE OR REPLACE FUNCTION queen.log_pop_discover_v1(
    p_tenant uuid, p_namespace text, p_task text, p_group text, p_worker text, p_budget int, p_cap int,
    p_lease int, p_auto_ack boolean, p_mode text, p_from text)
RETURNS TABLE (partition_name text, verdict text, partition_id uuid, base_offset bigint, start_frame int, take int,
               created_at timestamptz, batch_end bigint, last_offset bigint, until timestamptz, blob bytea)
LANGUAGE plpgsql AS $$
DECLARE
    v_queues uuid[];
BEGIN
    SELECT array_agg(q.id) INTO v_queues
      FROM (SELECT queen.log_register_group_v1(p_tenant, x.name, p_group, p_mode, p_from) AS id
              FROM (SELECT q.name FROM queen.queues q
                     WHERE q.tenant_id = p_tenant AND (p_namespace = '' OR q.namespace = p_namespace)
                       AND (p_task = '' OR q.task = p_task)
                     ORDER BY q.name) x) q;
    IF v_queues IS NOT NULL THEN
        RETURN QUERY SELECT s.* FROM queen.log_pop_scan_v1(
            v_queues, p_group, p_worker, p_budget, p_cap, p_lease, p_auto_ack, p_mode, p_from) s;
    END IF;
END $$;

-- Cheap probes for parked pops: false is certain, true means try. A first contact is always true,
-- since what it seeds depends on when it runs.
CREATE OR REPLACE FUNCTION queen.log_has_pending_v1(p_tenant uuid, p_queue text, p_group text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT 1 FROM queen.consumer_groups_metadata m
                         JOIN queen.queues q ON q.id = m.queue_id
                        WHERE q.tenant_id = p_tenant AND q.name = p_queue AND m.consumer_group = p_group
                          AND m.partition_name = '')
        OR EXISTS (SELECT 1 FROM queen.queues q
                     JOIN queen.log_partitions p ON p.queue_id = q.id
                     LEFT JOIN queen.log_consumers c ON c.partition_id = p.id AND c.consumer_group = p_group
                    WHERE q.tenant_id = p_tenant AND q.name = p_queue
                      AND (c.partition_id IS NULL OR p.last_offset > greatest(c.committed, p.log_start - 1)))
$$;

CREATE OR REPLACE FUNCTION queen.log_discover_has_pending_v1(
    p_tenant uuid, p_namespace text, p_task text, p_group text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM queen.queues q
                    WHERE q.tenant_id = p_tenant AND (p_namespace = '' OR q.namespace = p_namespace)
                      AND (p_task = '' OR q.task = p_task)
                      AND queen.log_has_pending_v1(p_tenant, q.name, p_group))
$$;

-- Extends every live lease of a worker, never shortening one and never reviving an expired one.
-- p_partitions narrows the search to where the caller knows them to be; null searches all cursors.
-- Returns the number renewed and the earliest new expiry (null when none).
CREATE OR REPLACE FUNCTION queen.log_renew_lease_v1(p_tenant uuid, p_worker text, p_seconds int, p_partitions uuid[])
RETURNS TABLE (renewed int, expires_at timestamptz) LANGUAGE plpgsql AS $$
DECLARE
    v_partitions uuid[] := p_partitions;
BEGIN
    IF v_partitions IS NULL THEN
        SELECT array_agg(c.partition_id) INTO v_partitions FROM queen.log_consumers c WHERE c.worker_id = p_worker;
    END IF;
    PERFORM 1 FROM queen.log_consumers c  -- in the order in which acks lock
      WHERE c.partition_id = ANY (v_partitions) AND c.worker_id = p_worker
      ORDER BY c.partition_id, c.consumer_group FOR NO KEY UPDATE;
    RETURN QUERY
        WITH renewed AS (
            UPDATE queen.log_consumers c
               SET lease_expires_at = greatest(c.lease_expires_at,
                                               clock_timestamp() + make_interval(secs => greatest(p_seconds, 1)))
             WHERE c.partition_id = ANY (v_partitions) AND c.worker_id = p_worker
               AND c.lease_expires_at >= clock_timestamp()
               AND EXISTS (SELECT 1 FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
                            WHERE p.id = c.partition_id AND q.tenant_id = p_tenant)
            RETURNING c.lease_expires_at)
        SELECT count(*)::int, min(r.lease_expires_at) FROM renewed r;
END $$;

-- Gives a lease back before anybody saw the batch: its pop's client had left. Undoes the attempt too.
CREATE OR REPLACE FUNCTION queen.log_release_lease_v1(p_worker text, p_group text, p_partitions uuid[])
RETURNS void LANGUAGE sql AS $$
    SELECT 1 FROM queen.log_consumers c
     WHERE c.partition_id = ANY (p_partitions) AND c.consumer_group = p_group AND c.worker_id = p_worker
     ORDER BY c.partition_id FOR NO KEY UPDATE;
    UPDATE queen.log_consumers c
       SET worker_id = NULL, lease_expires_at = NULL, batch_end = NULL, lease_conflated = false,
           attempt_count = greatest(c.attempt_count - 1, 0)
     WHERE c.partition_id = ANY (p_partitions) AND c.consumer_group = p_group AND c.worker_id = p_worker;
$$;
