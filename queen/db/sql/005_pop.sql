-- Pop: the candidates of each kind of pop, and the cheap probes of a parked one.

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
