-- The queues of a cluster as the proxy counts them.

-- Notes queues that pushes created, with the partitions seen so far; a count never falls here.
-- p_rows: [{"cluster_id","name","partitions"}].
CREATE OR REPLACE FUNCTION queen_proxy.note_queues(p_rows jsonb) RETURNS void LANGUAGE sql AS $$
    INSERT INTO queen_proxy.queues AS q (cluster_id, name, partitions_count)
    SELECT r.cluster_id, r.name, max(r.partitions)
      FROM jsonb_to_recordset(p_rows) AS r (cluster_id uuid, name text, partitions integer)
      JOIN queen_proxy.clusters c ON c.id = r.cluster_id
     GROUP BY r.cluster_id, r.name
     ORDER BY r.cluster_id, r.name
    ON CONFLICT (cluster_id, name) WHERE deleted_at IS NULL
    DO UPDATE SET partitions_count = greatest(q.partitions_count, EXCLUDED.partitions_count)
$$;

-- Takes over what the broker lists: counts as listed; a queue it doesn't list is deleted, unless it was
-- noted within p_seconds, the time since the broker was asked. Returns how many were deleted.
CREATE OR REPLACE FUNCTION queen_proxy.confirm_queues(
    p_cluster uuid, p_names text[], p_partitions integer[], p_seconds double precision
) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_deleted integer;
BEGIN
    INSERT INTO queen_proxy.queues AS q (cluster_id, name, partitions_count)
    SELECT p_cluster, name, partitions FROM unnest(p_names, p_partitions) AS listed (name, partitions)
     WHERE EXISTS (SELECT 1 FROM queen_proxy.clusters WHERE id = p_cluster)
     ORDER BY name
    ON CONFLICT (cluster_id, name) WHERE deleted_at IS NULL
    DO UPDATE SET partitions_count = EXCLUDED.partitions_count
     WHERE q.partitions_count <> EXCLUDED.partitions_count;
    UPDATE queen_proxy.queues SET deleted_at = now()
     WHERE cluster_id = p_cluster AND deleted_at IS NULL AND name <> ALL (p_names)
       AND created_at < clock_timestamp() - make_interval(secs => p_seconds);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$$;
