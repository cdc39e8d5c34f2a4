-- Ack: moves cursors, ends leases, spends retry budget, files dead letters.

-- One ack of one cursor: the decision procedure.
-- Takes the tenant (null: ownership already known), partition, group, the worker that holds the lease
-- ('' for a lease-less ack), the leases a transaction may fall back on (null outside of one), the hashes
-- of the acked transaction ids and their statuses, one letter each in the same order (c completed,
-- f failed, r retry, d dlq; '' when all are completed). p_dead_* is the message to file if this ack
-- dead-letters the one at p_dead_offset.
-- Returns one row: error (the whole ack refused, nothing changed), one letter per item (k carried out,
-- n noop, s stale, u unresolved, x nothing was leased), whether the lease ended, whether it is still
-- pending, how many positions were retired, the offset to be dead-lettered, and whether it was filed.
-- With dead_offset set and not filed nothing was changed: the caller, who can open segments, calls
-- again with the message, and cursor and dead letter then change in one transaction.
CREATE OR REPLACE FUNCTION queen.log_ack_v1(
    p_tenant uuid, p_partition uuid, p_group text, p_worker text, p_leases text[], p_hashes bytea, p_statuses text,
    p_dead_offset bigint DEFAULT NULL, p_dead_id uuid DEFAULT NULL, p_dead_txn text DEFAULT NULL,
    p_dead_payload text DEFAULT NULL, p_dead_producer text DEFAULT NULL, p_dead_encrypted boolean DEFAULT NULL,
    p_dead_pushed_at timestamptz DEFAULT NULL, p_dead_error text DEFAULT NULL,
    OUT error text, OUT items text, OUT released boolean, OUT retired bigint,
    OUT dead_offset bigint, OUT filed boolean)
LANGUAGE plpgsql AS $$
DECLARE
    c record;
    q record;
    head record;
    v_n int := octet_length(p_hashes) / 16;
    v_hi bigint;
    v_new bigint;
    v_span bytea;
    v_eff bigint[];
    v_below boolean[];
    v_signal bigint;
    v_kind text;
    v_status text;
    v_rest bytea := '';
    v_rest_at int[] := '{}';
    v_dead_letters boolean;
BEGIN
    released := false;
    filed := false;
    retired := 0;
    IF p_tenant IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM queen.log_partitions p JOIN queen.queues u ON u.id = p.queue_id
             WHERE p.id = p_partition AND u.tenant_id = p_tenant) THEN
        error := 'partition not owned by tenant';
        RETURN;
    END IF;
    SELECT k.committed, k.batch_end, k.worker_id, k.lease_expires_at, k.batch_retry_count, k.lease_conflated
      INTO c
      FROM queen.log_consumers k
     WHERE k.partition_id = p_partition AND k.consumer_group = p_group
       FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        error := 'consumer not found';
        RETURN;
    END IF;
    IF (p_worker <> '' AND (c.worker_id IS DISTINCT FROM p_worker OR c.lease_expires_at IS NULL
                            OR c.lease_expires_at < clock_timestamp()))
       OR (p_worker = '' AND p_leases <> '{}' AND (c.worker_id IS NULL OR c.worker_id <> ALL (p_leases)
                            OR c.lease_expires_at IS NULL OR c.lease_expires_at < clock_timestamp())) THEN
        error := 'invalid or expired lease';
        RETURN;
    END IF;
    v_hi := coalesce(c.batch_end, 9223372036854775807);

    -- The usual ack names exactly the next messages in order: one comparison of bytes decides it, and
    -- it needs no memory of the pop, so any worker of any broker can serve it.
    IF p_statuses = '' AND v_n > 0 AND c.committed + v_n <= v_hi THEN
        SELECT t.base_offset, t.end_offset, t.hashes INTO head
          FROM queen.log_txns t
         WHERE t.partition_id = p_partition AND t.base_offset <= c.committed + 1
         ORDER BY t.base_offset DESC LIMIT 1;
        IF head.end_offset >= c.committed + v_n THEN
            v_span := substring(head.hashes FROM (c.committed + 1 - head.base_offset)::int * 16 + 1 FOR v_n * 16);
        ELSE
            SELECT string_agg(
                       substring(s.hashes FROM greatest(c.committed + 1 - s.base_offset, 0)::int * 16 + 1
                                 FOR (least(c.committed + v_n, s.end_offset)
                                      - greatest(c.committed + 1, s.base_offset) + 1)::int * 16),
                       ''::bytea ORDER BY s.base_offset)
              INTO v_span
              FROM queen.log_txns s
             WHERE s.partition_id = p_partition AND s.end_offset > c.committed
               AND s.base_offset >= coalesce(head.base_offset, 0) AND s.base_offset <= c.committed + v_n;
        END IF;
        IF v_span = p_hashes THEN
            v_new := c.committed + v_n;
            items := '';
        END IF;
    END IF;

    IF v_new IS NULL THEN
        v_new := c.committed;
        v_eff := array_fill(NULL::bigint, ARRAY[greatest(v_n, 1)]);
        v_below := array_fill(false, ARRAY[greatest(v_n, 1)]);
        SELECT coalesce(array_agg(x.off ORDER BY x.k), v_eff) INTO v_eff
          FROM (SELECT k, f.off FROM generate_series(1, v_n) k
                  LEFT JOIN queen.log_find_hashes(p_partition, p_hashes, c.committed + 1, v_hi, '-infinity') f
                    ON f.i = k - 1) x;
        FOR k IN 1 .. v_n LOOP
            v_status := CASE WHEN p_statuses = '' THEN 'c' ELSE substr(p_statuses, k, 1) END;
            IF v_eff[k] IS NULL THEN
                v_rest := v_rest || substring(p_hashes FROM k * 16 - 15 FOR 16);
                v_rest_at := v_rest_at || k;
            ELSIF v_status <> 'c' AND (v_signal IS NULL OR v_eff[k] < v_signal OR (v_eff[k] = v_signal
                    AND position(v_status IN 'dfr') < position(v_kind IN 'dfr'))) THEN
                v_signal := v_eff[k];
                v_kind := v_status;
            END IF;
        END LOOP;
        -- What is not in the span may lie at or below the cursor. The only look at the history behind
        -- the lease, and only for the ids that need it.
        IF v_rest <> '' AND c.committed >= 0 THEN
            FOR v_status, v_hi IN
                SELECT 'b', f.i FROM queen.log_find_hashes(p_partition, v_rest, 0, c.committed, '-infinity') f
            LOOP
                v_below[v_rest_at[v_hi + 1]] := true;
            END LOOP;
        END IF;
        items := '';
        FOR k IN 1 .. v_n LOOP
            v_status := CASE WHEN p_statuses = '' THEN 'c' ELSE substr(p_statuses, k, 1) END;
            IF v_eff[k] IS NULL THEN
                items := items || CASE WHEN NOT v_below[k] THEN 'u' WHEN v_status = 'c' THEN 'n' ELSE 's' END;
            ELSIF v_status = 'c' THEN
                items := items || 'k';
                IF (v_signal IS NULL OR v_eff[k] < v_signal) AND v_eff[k] > v_new THEN
                    v_new := v_eff[k];
                END IF;
            ELSE
                items := items || CASE WHEN c.batch_end IS NULL THEN 'x' ELSE 'k' END;
            END IF;
        END LOOP;
        IF v_new = c.committed AND (v_signal IS NULL OR c.batch_end IS NULL) THEN
            RETURN;
        END IF;
    END IF;

    IF v_signal IS NOT NULL AND c.batch_end IS NOT NULL THEN
        SELECT coalesce(u.retry_limit, 3) AS retry_limit,
               coalesce(u.dead_letter_queue, false) OR coalesce(u.dlq_after_max_retries, false) AS dead_letters
          INTO q
          FROM queen.log_partitions p JOIN queen.queues u ON u.id = p.queue_id WHERE p.id = p_partition;
        v_dead_letters := v_kind = 'd' OR (v_kind = 'f' AND c.batch_retry_count >= q.retry_limit AND q.dead_letters);
        IF v_dead_letters AND p_dead_offset IS DISTINCT FROM v_signal THEN
            dead_offset := v_signal;
            RETURN;
        END IF;
        released := true;
        IF v_dead_letters THEN
            INSERT INTO queen.log_dlq (partition_id, consumer_group, "offset", message_id, transaction_id, payload,
                                       producer_sub, encrypted, error, retry_count, pushed_at)
            VALUES (p_partition, p_group, v_signal, p_dead_id, p_dead_txn, p_dead_payload, p_dead_producer,
                    p_dead_encrypted, p_dead_error, c.batch_retry_count, p_dead_pushed_at);
            dead_offset := v_signal;
            filed := true;
            retired := v_signal - c.committed;
        ELSIF v_kind = 'f' AND c.batch_retry_count >= q.retry_limit THEN
            retired := v_signal - c.committed;  -- dead letters off: the message is dropped
        ELSE
            retired := v_new - c.committed;
        END IF;
        UPDATE queen.log_consumers k
           SET committed = c.committed + retired, total_consumed = k.total_consumed + retired,
               worker_id = NULL, lease_expires_at = NULL, batch_end = NULL, lease_conflated = false,
               batch_retry_count = CASE WHEN v_kind = 'r' THEN k.batch_retry_count
                                        WHEN v_kind = 'f' AND c.batch_retry_count < q.retry_limit
                                        THEN k.batch_retry_count + 1 ELSE 0 END,
               attempt_offset = CASE WHEN v_kind = 'd' OR (v_kind = 'f' AND c.batch_retry_count >= q.retry_limit)
                                     THEN NULL ELSE k.attempt_offset END,
               attempt_count = CASE WHEN v_kind = 'd' OR (v_kind = 'f' AND c.batch_retry_count >= q.retry_limit)
                                    THEN 0 ELSE k.attempt_count END
         WHERE k.partition_id = p_partition AND k.consumer_group = p_group;
        RETURN;
    END IF;

    IF c.lease_conflated AND c.batch_end IS NOT NULL THEN
        v_new := c.batch_end;
    END IF;
    released := c.batch_end IS NOT NULL AND v_new >= c.batch_end;
    retired := v_new - c.committed;
    IF released THEN
        UPDATE queen.log_consumers k
           SET committed = v_new, total_consumed = k.total_consumed + retired, worker_id = NULL,
               lease_expires_at = NULL, batch_end = NULL, lease_conflated = false, batch_retry_count = 0,
               attempt_offset = NULL, attempt_count = 0
         WHERE k.partition_id = p_partition AND k.consumer_group = p_group;
    ELSE
        -- The lease goes on: the rest is still this attempt, not fresh work.
        UPDATE queen.log_consumers k
           SET committed = v_new, total_consumed = k.total_consumed + retired,
               attempt_offset = CASE WHEN c.batch_end IS NULL THEN k.attempt_offset ELSE v_new + 1 END
         WHERE k.partition_id = p_partition AND k.consumer_group = p_group;
    END IF;
END $$;

-- Several acks in one transaction, in the order of the cursors' key. Aligned arrays as in log_ack_v1.
-- Returns one row per ack with its position, from 1.
CREATE OR REPLACE FUNCTION queen.log_ack_multi_v1(
    p_tenants uuid[], p_partitions uuid[], p_groups text[], p_workers text[], p_hashes bytea[], p_statuses text[])
RETURNS TABLE (i int, error text, items text, released boolean, retired bigint, dead_offset bigint)
LANGUAGE plpgsql AS $$
DECLARE
    k int;
    r record;
BEGIN
    FOR k IN SELECT u.k FROM unnest(p_partitions, p_groups) WITH ORDINALITY AS u (pid, grp, k)
              ORDER BY u.pid, u.grp, u.k
    LOOP
        r := queen.log_ack_v1(p_tenants[k], p_partitions[k], p_groups[k], p_workers[k], NULL, p_hashes[k],
                              p_statuses[k]);
        i := k;
        error := r.error;
        items := r.items;
        released := r.released;
        retired := r.retired;
        dead_offset := r.dead_offset;
        RETURN NEXT;
    END LOOP;
END $$;
