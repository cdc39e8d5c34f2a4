-- Dead letters: listing and removal. They are filed by an ack.

-- The dead letters of a tenant with their queue and partition. A filter that is null asks nothing; both
-- times are inclusive, the later one to the millisecond that answers print.
CREATE OR REPLACE FUNCTION queen.log_dlq_select_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz)
RETURNS TABLE (letter queen.log_dlq, queue text, partition_name text, retry_limit int) LANGUAGE sql STABLE AS $$
    SELECT d, q.name::text, p.name, q.retry_limit
      FROM queen.queues q
      JOIN queen.log_partitions p ON p.queue_id = q.id
      JOIN queen.log_dlq d ON d.partition_id = p.id
     WHERE q.tenant_id = p_tenant AND (p_queue IS NULL OR q.name = p_queue)
       AND (p_partition IS NULL OR p.name = p_partition) AND (p_group IS NULL OR d.consumer_group = p_group)
       AND (p_from IS NULL OR d.failed_at >= p_from)
       AND (p_to IS NULL OR d.failed_at < p_to + interval '1 millisecond')
$$;

-- A page of dead letters, the last filed first. Times are the client's text; one that is no time raises
-- a data exception. Returns for each its fields as a JSON object without the payload, the payload as it
-- was sent, and whether that is encrypted: it may be anything a client called JSON, so nothing here
-- parses it.
CREATE OR REPLACE FUNCTION queen.get_dlq_messages_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from text, p_to text, p_limit int, p_offset int)
RETURNS TABLE (fields json, payload text, encrypted boolean) LANGUAGE sql STABLE AS $$
    SELECT json_build_object(
               'id', (d.letter).id, 'transactionId', (d.letter).transaction_id,
               'partitionId', (d.letter).partition_id, 'queue', d.queue, 'partition', d.partition_name,
               'consumerGroup', (d.letter).consumer_group, 'errorMessage', (d.letter).error,
               'retryCount', coalesce((d.letter).retry_count, d.retry_limit),
               'producerSub', (d.letter).producer_sub,
               'createdAt', queen.iso_time(coalesce((d.letter).pushed_at, (d.letter).failed_at)),
               'failedAt', queen.iso_time((d.letter).failed_at)),
           (d.letter).payload, (d.letter).encrypted
      FROM queen.log_dlq_select_v1(p_tenant, p_queue, p_group, p_partition, p_from::timestamptz,
                                   p_to::timestamptz) d
     ORDER BY (d.letter).failed_at DESC, (d.letter).id DESC LIMIT p_limit OFFSET p_offset
$$;

-- Deletes the dead letters of a queue that match the filters. Returns how many.
-- They are locked in the order of their ids, as everywhere.
CREATE OR REPLACE FUNCTION queen.delete_dlq_messages_v1(
    p_tenant uuid, p_queue text, p_group text, p_partition text, p_from text, p_to text)
RETURNS bigint LANGUAGE sql AS $$
    WITH chosen AS MATERIALIZED (
        SELECT d.id FROM queen.log_dlq d
         WHERE d.id = ANY (ARRAY(
               SELECT (s.letter).id FROM queen.log_dlq_select_v1(
                   p_tenant, p_queue, p_group, p_partition, p_from::timestamptz, p_to::timestamptz) s))
         ORDER BY d.id FOR UPDATE),
    gone AS (
        DELETE FROM queen.log_dlq d USING chosen WHERE d.id = chosen.id RETURNING 1)
    SELECT count(*) FROM gone
$$;

-- Deletes the dead letters of one message, those of every group. Returns how many; none when the
-- partition is another tenant's.
CREATE OR REPLACE FUNCTION queen.delete_dead_letter_v1(p_tenant uuid, p_partition uuid, p_transaction text)
RETURNS bigint LANGUAGE sql AS $$
    WITH chosen AS MATERIALIZED (
        SELECT d.id FROM queen.log_dlq d
         WHERE d.partition_id = p_partition AND d.transaction_id = p_transaction
           AND EXISTS (SELECT 1 FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
                        WHERE p.id = p_partition AND q.tenant_id = p_tenant)
         ORDER BY d.id FOR UPDATE),
    gone AS (
        DELETE FROM queen.log_dlq d USING chosen WHERE d.id = chosen.id RETURNING 1)
    SELECT count(*) FROM gone
$$;
