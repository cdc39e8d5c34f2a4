-- Push: the one place where an offset is given out.

-- The 16-byte hashes of a hash row, numbered from 0 in frame order.
-- The caller passes a detoasted value: substring() on a toasted one would fetch it again per hash.
CREATE OR REPLACE FUNCTION queen.log_unnest_hashes(p_hashes bytea)
RETURNS TABLE (idx int, h bytea) LANGUAGE sql IMMUTABLE PARALLEL SAFE ROWS 100 AS $$
    SELECT g, substring(p_hashes FROM g * 16 + 1 FOR 16)
      FROM generate_series(0, octet_length(p_hashes) / 16 - 1) AS g
$$;

-- Which incoming hashes occur in [p_from, p_to] of a partition among rows not older than p_since.
-- Returns the index of each hit in p_hashes and its lowest offset. A few hashes are looked for by
-- position() (memory speed, no row per stored hash), many by one hash join.
CREATE OR REPLACE FUNCTION queen.log_find_hashes(
    p_partition uuid, p_hashes bytea, p_from bigint, p_to bigint, p_since timestamptz)
RETURNS TABLE (i int, off bigint) LANGUAGE plpgsql STABLE SET enable_hashjoin = on AS $$
DECLARE
    v_count int := octet_length(p_hashes) / 16;
    v_first bigint;
    v_row record;
    v_at int;
    v_skip int;
    v_found bigint[];
BEGIN
    -- The row that covers p_from, if one does: rows are disjoint and ascending, so it is one key step.
    SELECT coalesce((SELECT t.base_offset FROM queen.log_txns t
                      WHERE t.partition_id = p_partition AND t.base_offset <= p_from
                      ORDER BY t.base_offset DESC LIMIT 1), p_from) INTO v_first;
    IF v_count > 16 THEN
        RETURN QUERY
            WITH stored AS MATERIALIZED (
                SELECT t.base_offset, t.hashes || ''::bytea AS hashes
                  FROM queen.log_txns t
                 WHERE t.partition_id = p_partition AND t.base_offset >= v_first
                   AND t.base_offset <= p_to AND t.created_at >= p_since),
            cells AS (
                SELECT s.base_offset + u.idx AS off, u.h
                  FROM stored s CROSS JOIN LATERAL queen.log_unnest_hashes(s.hashes) u)
            SELECT n.idx, min(c.off)
              FROM queen.log_unnest_hashes(p_hashes) n JOIN cells c ON c.h = n.h
             WHERE c.off BETWEEN p_from AND p_to
             GROUP BY n.idx;
        RETURN;
    END IF;
    v_found := array_fill(NULL::bigint, ARRAY[v_count]);
    FOR v_row IN
        SELECT t.base_offset, t.hashes || ''::bytea AS hashes
          FROM queen.log_txns t
         WHERE t.partition_id = p_partition AND t.base_offset >= v_first
           AND t.base_offset <= p_to AND t.created_at >= p_since
         ORDER BY t.base_offset
    LOOP
        FOR k IN 1 .. v_count LOOP
            CONTINUE WHEN v_found[k] IS NOT NULL;
            v_skip := 0;
            LOOP
                v_at := position(substring(p_hashes FROM k * 16 - 15 FOR 16)
                                 IN substring(v_row.hashes FROM v_skip + 1));
                EXIT WHEN v_at = 0;
                v_at := v_at + v_skip;
                IF v_at % 16 = 1 AND v_row.base_offset + v_at / 16 BETWEEN p_from AND p_to THEN
                    v_found[k] := v_row.base_offset + v_at / 16;
                    EXIT;
                END IF;
                v_skip := v_at;  -- a match across two hashes, or below p_from: look on behind it
            END LOOP;
        END LOOP;
    END LOOP;
    RETURN QUERY SELECT k - 1, v_found[k] FROM generate_series(1, v_count) k WHERE v_found[k] IS NOT NULL;
END $$;

-- Creates the queues and partitions that do not exist yet. Both inserts are ordered by their unique
-- key (the global lock order), and empty queue names are skipped: the caller then finds them missing.
CREATE OR REPLACE FUNCTION queen.log_provision_v1(p_tenants uuid[], p_queues text[], p_partitions text[])
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queen.queues (tenant_id, name, namespace, task)
    SELECT DISTINCT u.tenant, u.queue, split_part(u.queue, '.', 1), split_part(u.queue, '.', 2)
      FROM unnest(p_tenants, p_queues) AS u (tenant, queue)
     WHERE u.queue <> ''
       AND NOT EXISTS (SELECT 1 FROM queen.queues q WHERE q.tenant_id = u.tenant AND q.name = u.queue)
     ORDER BY u.tenant, u.queue
    ON CONFLICT (tenant_id, name) DO NOTHING;
    INSERT INTO queen.log_partitions (queue_id, name)
    SELECT DISTINCT q.id, u.part
      FROM unnest(p_tenants, p_queues, p_partitions) AS u (tenant, queue, part)
      JOIN queen.queues q ON q.tenant_id = u.tenant AND q.name = u.queue
     WHERE NOT EXISTS (SELECT 1 FROM queen.log_partitions p WHERE p.queue_id = q.id AND p.name = u.part)
     ORDER BY q.id, u.part
    ON CONFLICT (queue_id, name) DO NOTHING;
END $$;

-- Appends one segment to each of several partitions in one transaction.
-- Takes aligned arrays, one entry per partition (each partition once): tenant, queue, partition,
-- message count, hashes (16 bytes a message), blob, whether its payloads are sealed (1, else 0), and what
-- the caller vouches for: in the partition with the id p_vouched none of the hashes occurs at or below
-- p_verified within p_windows seconds (-1 vouches for nothing, and neither does an id of a partition that
-- was deleted since).
-- Returns one row per entry, in input order: either base_offset and created_at, or the duplicates
-- (indexes from 0 and their lowest offsets), and then nothing of that entry was written. Neither is it
-- when the queue is encrypted and the entry not sealed, which is a row with none of these: the flag is
-- judged here, since what a broker remembers of it may be out of date.
-- Raises QMULTI and QPUSH errors; any of them rolls back the whole bundle. QP001 means that a queue was
-- deleted meanwhile: trying again creates it anew.
CREATE OR REPLACE FUNCTION queen.log_push_multi_v1(
    p_tenants uuid[], p_queues text[], p_partitions text[], p_counts int[], p_hashes bytea[],
    p_blobs bytea[], p_sealed int[], p_vouched uuid[], p_verified bigint[], p_windows int[])
RETURNS TABLE (i int, base_offset bigint, created_at timestamptz, dup_idx int[], dup_off bigint[],
               partition_id uuid, window_seconds int, encrypted boolean) LANGUAGE plpgsql AS $$
DECLARE
    v_n int := coalesce(array_length(p_queues, 1), 0);
    v_ord int[];         -- input positions, in ascending partition id
    v_ids uuid[];
    v_last bigint[];
    v_start bigint[];
    v_window int[];
    v_encrypted boolean[];
    v_now timestamptz;
    v_from bigint;
    v_dup_idx int[];
    v_dup_off bigint[];
    v_take int[] := '{}';     -- positions within v_ord to be written
    v_written uuid[] := '{}'; -- and their partitions
BEGIN
    IF coalesce(array_length(p_partitions, 1), 0) <> v_n OR coalesce(array_length(p_counts, 1), 0) <> v_n
       OR coalesce(array_length(p_hashes, 1), 0) <> v_n OR coalesce(array_length(p_blobs, 1), 0) <> v_n
       OR coalesce(array_length(p_sealed, 1), 0) <> v_n OR coalesce(array_length(p_vouched, 1), 0) <> v_n
       OR coalesce(array_length(p_verified, 1), 0) <> v_n OR coalesce(array_length(p_windows, 1), 0) <> v_n THEN
        RAISE EXCEPTION 'QMULTI misaligned arrays';
    END IF;
    IF coalesce(array_length(p_tenants, 1), 0) <> v_n THEN
        RAISE EXCEPTION 'QMULTI misaligned tenants';
    END IF;
    FOR k IN 1 .. v_n LOOP
        IF p_counts[k] < 1 OR octet_length(p_hashes[k]) <> 16 * p_counts[k] THEN
            RAISE EXCEPTION 'QPUSH bad segment: % messages, % bytes of hashes for queue "%" partition "%"',
                p_counts[k], octet_length(p_hashes[k]), p_queues[k], p_partitions[k];
        END IF;
    END LOOP;

    FOR attempt IN 1 .. 2 LOOP
        -- Lateral steps with OFFSET 0: the planner can't turn them around into a walk of a whole index.
        SELECT array_agg(x.ord ORDER BY x.id), array_agg(x.id ORDER BY x.id), array_agg(x.win ORDER BY x.id),
               array_agg(x.enc ORDER BY x.id)
          INTO v_ord, v_ids, v_window, v_encrypted
          FROM (SELECT u.ord::int, p.id, q.win, q.enc
                  FROM unnest(p_tenants, p_queues, p_partitions) WITH ORDINALITY AS u (tenant, queue, part, ord)
                 CROSS JOIN LATERAL (SELECT t.id, t.dedup_window_seconds AS win, t.encryption_enabled AS enc
                                       FROM queen.queues t
                                      WHERE t.tenant_id = u.tenant AND t.name = u.queue OFFSET 0) q
                 CROSS JOIN LATERAL (SELECT t.id FROM queen.log_partitions t
                                      WHERE t.queue_id = q.id AND t.name = u.part OFFSET 0) p) x;
        EXIT WHEN cardinality(v_ids) = v_n;
        IF attempt = 2 THEN
            RAISE EXCEPTION 'QMULTI resolved % of % segments', coalesce(cardinality(v_ids), 0), v_n
                USING ERRCODE = 'QP001';
        END IF;
        PERFORM queen.log_provision_v1(p_tenants, p_queues, p_partitions);
    END LOOP;
    SELECT array_agg(x.last_offset), array_agg(x.txns_start) INTO v_last, v_start
      FROM (SELECT p.last_offset, p.txns_start FROM queen.log_partitions p
             WHERE p.id = ANY (v_ids) ORDER BY p.id FOR NO KEY UPDATE) x;
    IF coalesce(cardinality(v_last), 0) <> v_n THEN
        RAISE EXCEPTION 'QPUSH partition of queue "%" vanished mid-push', p_queues[v_ord[1]]
            USING ERRCODE = 'QP001';
    END IF;

    v_now := clock_timestamp();  -- read under the locks: monotone per partition in commit order
    FOR k IN 1 .. v_n LOOP
        v_dup_idx := NULL;
        IF k > 1 AND v_ids[k] = v_ids[k - 1] THEN
            RAISE EXCEPTION 'QMULTI partition "%" of queue "%" given twice',
                p_partitions[v_ord[k]], p_queues[v_ord[k]];
        END IF;
        IF v_encrypted[k] AND p_sealed[v_ord[k]] <> 1 THEN
            i := v_ord[k];
            base_offset := NULL;
            created_at := NULL;
            dup_idx := NULL;
            dup_off := NULL;
            partition_id := v_ids[k];
            window_seconds := v_window[k];
            encrypted := true;
            RETURN NEXT;
            CONTINUE;
        END IF;
        IF v_window[k] > 0 THEN
            v_from := greatest(CASE WHEN p_vouched[v_ord[k]] = v_ids[k] AND p_windows[v_ord[k]] >= v_window[k]
                                    THEN p_verified[v_ord[k]] ELSE -1 END, v_start[k] - 1);
            IF v_last[k] > v_from THEN
                SELECT array_agg(f.i ORDER BY f.i), array_agg(f.off ORDER BY f.i)
                  INTO v_dup_idx, v_dup_off
                  FROM queen.log_find_hashes(v_ids[k], p_hashes[v_ord[k]], v_from + 1, v_last[k],
                                             v_now - make_interval(secs => v_window[k])) f;
            END IF;
        END IF;
        i := v_ord[k];
        partition_id := v_ids[k];
        window_seconds := v_window[k];
        encrypted := v_encrypted[k];
        IF v_dup_idx IS NULL THEN
            v_take := v_take || k;
            v_written := v_written || v_ids[k];
            base_offset := v_last[k] + 1;
            created_at := v_now;
            dup_idx := NULL;
            dup_off := NULL;
        ELSE
            base_offset := NULL;
            created_at := NULL;
            dup_idx := v_dup_idx;
            dup_off := v_dup_off;
        END IF;
        RETURN NEXT;
    END LOOP;

    IF v_take <> '{}' THEN
        UPDATE queen.log_partitions p
           SET last_offset = p.last_offset + p_counts[v_ord[array_position(v_ids, p.id)]],
               last_write_at = CASE WHEN p.last_write_at < v_now - interval '1 second'
                                    THEN v_now ELSE p.last_write_at END,
               oldest_live_at = coalesce(p.oldest_live_at, v_now),
               oldest_txn_at = coalesce(p.oldest_txn_at, v_now)
         WHERE p.id = ANY (v_written);
        INSERT INTO queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
        SELECT v_ids[t.k], v_last[t.k] + 1, v_last[t.k] + p_counts[v_ord[t.k]], v_now, p_blobs[v_ord[t.k]]
          FROM unnest(v_take) AS t (k);
        INSERT INTO queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
        SELECT v_ids[t.k], v_last[t.k] + 1, v_last[t.k] + p_counts[v_ord[t.k]], v_now, p_hashes[v_ord[t.k]]
          FROM unnest(v_take) AS t (k);
    END IF;
END $$;

-- The segment that covers an offset: base, creation time and blob, or no row.
CREATE OR REPLACE FUNCTION queen.log_segment_at_v1(p_partition uuid, p_offset bigint)
RETURNS TABLE (base_offset bigint, created_at timestamptz, blob bytea) LANGUAGE sql STABLE AS $$
    SELECT s.base_offset, s.created_at, s.blob
      FROM (SELECT * FROM queen.log_segments g
             WHERE g.partition_id = p_partition AND g.base_offset <= p_offset
             ORDER BY g.base_offset DESC LIMIT 1) s
     WHERE s.end_offset >= p_offset
$$;

-- Hash rows of a partition from an offset on, not older than a window: what a broker's duplicate
-- cache is built from and how it catches up. Ascending; base_offset, created_at, hashes.
CREATE OR REPLACE FUNCTION queen.log_hashes_since_v1(p_partition uuid, p_from bigint, p_window int)
RETURNS TABLE (base_offset bigint, created_at timestamptz, hashes bytea) LANGUAGE sql STABLE AS $$
    SELECT t.base_offset, t.created_at, t.hashes
      FROM queen.log_txns t
     WHERE t.partition_id = p_partition
       AND t.base_offset >= coalesce((SELECT f.base_offset FROM queen.log_txns f
                                       WHERE f.partition_id = p_partition AND f.base_offset <= p_from
                                       ORDER BY f.base_offset DESC LIMIT 1), p_from)
       AND t.end_offset >= p_from
       AND t.created_at >= clock_timestamp() - make_interval(secs => p_window + 5)
     ORDER BY t.base_offset
$$;
