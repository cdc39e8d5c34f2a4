-- Leases: made longer, or given back.

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
