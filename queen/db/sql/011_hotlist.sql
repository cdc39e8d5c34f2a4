-- Hot-list: how a broker's memory of pending partitions is filled from the database.

-- Pending partitions of a queue for a group among those written since a time, a page at a time in the
-- order of (last_write_at, id). p_after_at, p_after_id: the last row of the previous page (null for the
-- first). Leased partitions are included; a partition without cursor is pending.
CREATE OR REPLACE FUNCTION queen.log_hotlist_reseed_window_v1(
    p_tenant uuid, p_queue text, p_group text, p_since timestamptz, p_after_at timestamptz, p_after_id uuid,
    p_limit int)
RETURNS TABLE (id uuid, name text, last_offset bigint, last_write_at timestamptz) LANGUAGE sql STABLE AS $$
    SELECT p.id, p.name, p.last_offset, p.last_write_at
      FROM queen.log_partitions p
      LEFT JOIN LATERAL (SELECT t.committed FROM queen.log_consumers t
                          WHERE t.partition_id = p.id AND t.consumer_group = p_group OFFSET 0) c ON true
     WHERE p.queue_id = (SELECT q.id FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue)
       AND p.last_write_at >= coalesce(p_after_at, p_since)
       AND (p_after_id IS NULL OR (p.last_write_at, p.id) > (p_after_at, p_after_id))
       AND p.last_offset > coalesce(c.committed, -2)
     ORDER BY p.last_write_at, p.id LIMIT p_limit
$$;

-- The same without a time: every pending partition, in the order of the names, which the queue's own
-- index has (in that of the ids the walk would pass the partitions of every other queue). p_after: the
-- last name of the previous page, null for the first.
CREATE OR REPLACE FUNCTION queen.log_hotlist_reseed_v1(
    p_tenant uuid, p_queue text, p_group text, p_after text, p_limit int)
RETURNS TABLE (id uuid, name text, last_offset bigint) LANGUAGE sql STABLE AS $$
    SELECT p.id, p.name, p.last_offset
      FROM queen.log_partitions p
      LEFT JOIN LATERAL (SELECT t.committed FROM queen.log_consumers t
                          WHERE t.partition_id = p.id AND t.consumer_group = p_group OFFSET 0) c ON true
     WHERE p.queue_id = (SELECT q.id FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue)
       AND (p_after IS NULL OR p.name > p_after)
       AND p.last_offset > coalesce(c.committed, -2)
     ORDER BY p.name LIMIT p_limit
$$;

-- Partitions of some queues written since a time: one question for everything a worker has pops parked
-- on, so that a push whose hint was lost is found within one poll interval. p_since null means now.
-- Returns the position of the queue, the partition, its last offset and whether it is new since then, when
-- its offsets began anew; and first one row with position 0 whose at is the time to ask from next.
CREATE OR REPLACE FUNCTION queen.log_hotlist_changed_v2(
    p_tenants uuid[], p_queues text[], p_since timestamptz)
RETURNS TABLE (i int, name text, last_offset bigint, at timestamptz, born boolean) LANGUAGE sql STABLE AS $$
    SELECT 0, NULL::text, NULL::bigint, statement_timestamp(), false
    UNION ALL
    SELECT u.i::int, p.name, p.last_offset, NULL::timestamptz, p.born
      FROM unnest(p_tenants, p_queues) WITH ORDINALITY AS u (tenant, queue, i)
     CROSS JOIN LATERAL (SELECT t.id FROM queen.queues t
                          WHERE t.tenant_id = u.tenant AND t.name = u.queue OFFSET 0) q
     CROSS JOIN LATERAL (SELECT t.name, t.last_offset, t.created_at >= p_since AS born FROM queen.log_partitions t
                          WHERE t.queue_id = q.id AND t.last_write_at >= p_since OFFSET 0) p
$$;

-- The repair markers of every tenant, of which there are as many as groups moved within the hour.
CREATE OR REPLACE FUNCTION queen.log_hotlist_repairs_v1()
RETURNS TABLE (tenant uuid, queue text, consumer_group text, partition_name text, at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT r.tenant_id, r.queue_name, r.consumer_group, r.partition_name, r.repair_at FROM queen.hotlist_repairs r
$$;

-- What the pop path needs to know of a queue's configuration: seconds of window buffer and of delay,
-- milliseconds to wait for a fuller batch. No row for a queue that does not exist.
CREATE OR REPLACE FUNCTION queen.log_queue_flow_v1(p_tenant uuid, p_queue text)
RETURNS TABLE (window_buffer int, delayed_processing int, min_pop_wait_time int) LANGUAGE sql STABLE AS $$
    SELECT q.window_buffer, q.delayed_processing, q.min_pop_wait_time
      FROM queen.queues q WHERE q.tenant_id = p_tenant AND q.name = p_queue
$$;
