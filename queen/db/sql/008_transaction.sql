-- Transaction: pushes and acks, all or nothing, in one call.

-- Takes the arrays of log_push_multi_v1 (one tenant), and the arrays of acks with the dead letters to
-- file (null where none), plus the leases the request carries. Lock order: queues, partitions, cursors.
-- Returns one row per push ('push', position, base offset) and per ack ('ack', position, letters,
-- released). Raises, and so rolls everything back:
--   QE001  QENC  a queue is encrypted and the payloads for it are not sealed; the detail is its name
--   23505  QDUP  a pushed transaction id is already in its partition's window
--   QT001  QTXN  an ack was refused, or resolves nowhere, or its partition is another tenant's
--   QT002  QDEAD an ack dead-letters a message that was not supplied; the detail says which, as
--          'position:offset'. The caller opens the segment and calls again.
CREATE OR REPLACE FUNCTION queen.log_transaction_v1(
    p_tenant uuid, p_queues text[], p_partitions text[], p_counts int[], p_hashes bytea[], p_blobs bytea[],
    p_sealed int[], p_ack_partitions uuid[], p_ack_groups text[], p_ack_workers text[], p_leases text[],
    p_ack_hashes bytea[], p_ack_statuses text[], p_dead_offsets bigint[], p_dead_ids uuid[], p_dead_txns text[],
    p_dead_payloads text[], p_dead_producers text[], p_dead_encrypted int[],
    p_dead_pushed_at timestamptz[], p_dead_errors text[])
RETURNS TABLE (kind text, i int, base_offset bigint, items text, released boolean, filed boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_n int := coalesce(array_length(p_queues, 1), 0);
    k int;
    r record;
BEGIN
    FOR k IN 1 .. coalesce(array_length(p_ack_partitions, 1), 0) LOOP
        IF NOT EXISTS (SELECT 1 FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
                        WHERE p.id = p_ack_partitions[k] AND q.tenant_id = p_tenant) THEN
            RAISE EXCEPTION 'QTXN ack references partition % not owned by this tenant', p_ack_partitions[k]
                USING ERRCODE = 'QT001';
        END IF;
    END LOOP;

    IF v_n > 0 THEN
        FOR r IN SELECT * FROM queen.log_push_multi_v1(
                array_fill(p_tenant, ARRAY[v_n]), p_queues, p_partitions, p_counts, p_hashes, p_blobs,
                p_sealed, array_fill(NULL::uuid, ARRAY[v_n]), array_fill(-1::bigint, ARRAY[v_n]),
                array_fill(0, ARRAY[v_n]))
        LOOP
            IF r.dup_idx IS NOT NULL THEN
                RAISE EXCEPTION 'QDUP duplicate messages in queue "%" partition "%"; transaction rolled back',
                    p_queues[r.i], p_partitions[r.i] USING ERRCODE = 'unique_violation';
            ELSIF r.base_offset IS NULL THEN
                RAISE EXCEPTION 'QENC queue "%" is encrypted; transaction rolled back', p_queues[r.i]
                    USING ERRCODE = 'QE001', DETAIL = p_queues[r.i];
            END IF;
            kind := 'push';
            i := r.i;
            base_offset := r.base_offset;
            RETURN NEXT;
        END LOOP;
    END IF;

    kind := 'ack';
    base_offset := NULL;
    FOR k IN SELECT u.k FROM unnest(p_ack_partitions, p_ack_groups) WITH ORDINALITY AS u (pid, grp, k)
              ORDER BY u.pid, u.grp, u.k
    LOOP
        r := queen.log_ack_v1(NULL, p_ack_partitions[k], p_ack_groups[k], p_ack_workers[k], p_leases,
                              p_ack_hashes[k], p_ack_statuses[k], p_dead_offsets[k], p_dead_ids[k],
                              p_dead_txns[k], p_dead_payloads[k], p_dead_producers[k],
                              p_dead_encrypted[k] = 1, p_dead_pushed_at[k], p_dead_errors[k]);
        IF r.error IS NOT NULL THEN
            RAISE EXCEPTION 'QTXN ack failed for partition % group "%": %; transaction rolled back',
                p_ack_partitions[k], p_ack_groups[k], r.error USING ERRCODE = 'QT001';
        ELSIF r.dead_offset IS NOT NULL AND NOT r.filed THEN
            RAISE EXCEPTION 'QDEAD dead letter wanted' USING ERRCODE = 'QT002',
                DETAIL = k || ':' || r.dead_offset;
        ELSIF position('u' IN r.items) > 0 THEN
            RAISE EXCEPTION 'QTXN ack references unknown transactionId; transaction rolled back'
                USING ERRCODE = 'QT001';
        ELSIF position('x' IN r.items) > 0 THEN
            RAISE EXCEPTION 'QTXN ack failed for partition % group "%": no leased batch; transaction rolled back',
                p_ack_partitions[k], p_ack_groups[k] USING ERRCODE = 'QT001';
        END IF;
        i := k;
        items := r.items;
        released := r.released;
        filed := r.filed;
        RETURN NEXT;
    END LOOP;
END $$;
