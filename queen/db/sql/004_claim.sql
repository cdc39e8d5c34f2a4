-- Claim: how a pop gets messages, and its lease.

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
