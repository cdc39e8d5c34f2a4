-- What brokers of the version before call while a cluster is upgraded one broker at a time: the forms that
-- their statements name, over those in use now. They know no encryption, so they can't write to a queue
-- that is encrypted, and can't make one so.

-- Raises QE001 for a segment of an encrypted queue, which the older broker reports as failed.
CREATE OR REPLACE FUNCTION queen.log_push_multi_v1(
    p_tenants uuid[], p_queues text[], p_partitions text[], p_counts int[], p_hashes bytea[],
    p_blobs bytea[], p_vouched uuid[], p_verified bigint[], p_windows int[])
RETURNS TABLE (i int, base_offset bigint, created_at timestamptz, dup_idx int[], dup_off bigint[],
               partition_id uuid, window_seconds int) LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT * FROM queen.log_push_multi_v1(
            p_tenants, p_queues, p_partitions, p_counts, p_hashes, p_blobs,
            array_fill(0, ARRAY[coalesce(array_length(p_queues, 1), 0)]), p_vouched, p_verified, p_windows)
    LOOP
        IF r.base_offset IS NULL AND r.dup_idx IS NULL THEN
            RAISE EXCEPTION 'QENC queue "%" is encrypted', p_queues[r.i]
                USING ERRCODE = 'QE001', DETAIL = p_queues[r.i];
        END IF;
        i := r.i;
        base_offset := r.base_offset;
        created_at := r.created_at;
        dup_idx := r.dup_idx;
        dup_off := r.dup_off;
        partition_id := r.partition_id;
        window_seconds := r.window_seconds;
        RETURN NEXT;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION queen.log_transaction_v1(
    p_tenant uuid, p_queues text[], p_partitions text[], p_counts int[], p_hashes bytea[], p_blobs bytea[],
    p_ack_partitions uuid[], p_ack_groups text[], p_ack_workers text[], p_leases text[], p_ack_hashes bytea[],
    p_ack_statuses text[], p_dead_offsets bigint[], p_dead_ids uuid[], p_dead_txns text[],
    p_dead_payloads text[], p_dead_producers text[], p_dead_encrypted int[],
    p_dead_pushed_at timestamptz[], p_dead_errors text[])
RETURNS TABLE (kind text, i int, base_offset bigint, items text, released boolean, filed boolean)
LANGUAGE sql AS $$
    SELECT * FROM queen.log_transaction_v1(
        p_tenant, p_queues, p_partitions, p_counts, p_hashes, p_blobs,
        array_fill(0, ARRAY[coalesce(array_length(p_queues, 1), 0)]), p_ack_partitions, p_ack_groups,
        p_ack_workers, p_leases, p_ack_hashes, p_ack_statuses, p_dead_offsets, p_dead_ids, p_dead_txns,
        p_dead_payloads, p_dead_producers, p_dead_encrypted, p_dead_pushed_at, p_dead_errors)
$$;

CREATE OR REPLACE FUNCTION queen.configure_queue_v1(p_queue text, p_options jsonb, p_tenant uuid, p_merge boolean)
RETURNS json LANGUAGE sql AS $$
    SELECT queen.configure_queue_v1(p_queue, p_options, p_tenant, p_merge, false)
$$;
