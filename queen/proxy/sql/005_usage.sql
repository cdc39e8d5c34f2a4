-- Usage by minute, by day and by month, and the outbox. Days and months are those of UTC.

CREATE OR REPLACE FUNCTION queen_proxy.emit_outbox(p_kind text, p_payload jsonb) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_id uuid;
BEGIN
    INSERT INTO queen_proxy.outbox (kind, payload) VALUES (p_kind, coalesce(p_payload, '{}'))
    RETURNING id INTO v_id;
    RETURN v_id;
END
$$;

-- Adds a batch of counted minutes, once: a batch whose id was added before changes nothing and gives false.
-- p_rows: [{"cluster_id","minute","op_class","msgs","reqs","bytes_in","bytes_out"}]; a cluster that is gone
-- is passed over.
CREATE OR REPLACE FUNCTION queen_proxy.add_usage(p_batch uuid, p_rows jsonb) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_new integer;
BEGIN
    INSERT INTO queen_proxy.usage_batches (id) VALUES (p_batch) ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_new = ROW_COUNT;
    IF v_new = 0 THEN
        RETURN false;
    END IF;
    INSERT INTO queen_proxy.usage_minutes AS u (cluster_id, minute, op_class, msgs, reqs, bytes_in, bytes_out)
    SELECT r.cluster_id, r.minute, r.op_class, sum(r.msgs), sum(r.reqs), sum(r.bytes_in), sum(r.bytes_out)
      FROM jsonb_to_recordset(p_rows) AS r (
           cluster_id uuid, minute timestamptz, op_class text, msgs bigint, reqs bigint,
           bytes_in bigint, bytes_out bigint)
      JOIN queen_proxy.clusters c ON c.id = r.cluster_id
     GROUP BY r.cluster_id, r.minute, r.op_class
     ORDER BY r.cluster_id, r.minute, r.op_class
    ON CONFLICT (cluster_id, minute, op_class) DO UPDATE SET
        msgs = u.msgs + EXCLUDED.msgs, reqs = u.reqs + EXCLUDED.reqs,
        bytes_in = u.bytes_in + EXCLUDED.bytes_in, bytes_out = u.bytes_out + EXCLUDED.bytes_out;
    RETURN true;
END
$$;

-- Recomputes the days up to p_through (NULL: yesterday) from the minutes there are; a day that is not over
-- is left out. Returns the number of rows written.
CREATE OR REPLACE FUNCTION queen_proxy.rollup_usage_days(p_through date DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_yesterday date := (now() AT TIME ZONE 'UTC')::date - 1;
    v_through date := least(coalesce(p_through, v_yesterday), v_yesterday);
    v_rows integer;
BEGIN
    INSERT INTO queen_proxy.usage_days AS d (cluster_id, day, op_class, msgs, reqs, bytes_in, bytes_out)
    SELECT cluster_id, (minute AT TIME ZONE 'UTC')::date, op_class,
           sum(msgs), sum(reqs), sum(bytes_in), sum(bytes_out)
      FROM queen_proxy.usage_minutes
     WHERE minute < ((v_through + 1)::timestamp AT TIME ZONE 'UTC')
     GROUP BY 1, 2, 3
     ORDER BY 1, 2, 3
    ON CONFLICT (cluster_id, day, op_class) DO UPDATE SET
        msgs = EXCLUDED.msgs, reqs = EXCLUDED.reqs,
        bytes_in = EXCLUDED.bytes_in, bytes_out = EXCLUDED.bytes_out;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows;
END
$$;

-- Deletes minutes of whole days older than p_keep_days, where the day's sum is kept. Returns how many.
CREATE OR REPLACE FUNCTION queen_proxy.prune_usage_minutes(p_keep_days integer DEFAULT 90) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_before timestamptz;
    v_rows integer;
BEGIN
    IF p_keep_days IS NULL OR p_keep_days < 1 THEN
        RAISE EXCEPTION 'prune_usage_minutes: keep days must be at least 1, not %', coalesce(p_keep_days::text, 'NULL');
    END IF;
    v_before := ((now() AT TIME ZONE 'UTC')::date - p_keep_days)::timestamp AT TIME ZONE 'UTC';
    DELETE FROM queen_proxy.usage_minutes m USING queen_proxy.usage_days d
     WHERE m.minute < v_before AND d.cluster_id = m.cluster_id AND d.op_class = m.op_class
       AND d.day = (m.minute AT TIME ZONE 'UTC')::date;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    DELETE FROM queen_proxy.usage_batches WHERE counted_at < v_before;
    RETURN v_rows;
END
$$;

-- The messages a cluster was billed in the month of p_month. For each day the larger of the day's sum and
-- its live minutes counts, since either may lack what the other has.
CREATE OR REPLACE FUNCTION queen_proxy.cluster_month_msgs(p_cluster uuid, p_month date) RETURNS bigint
LANGUAGE sql STABLE AS $$
    WITH bounds AS (
        SELECT date_trunc('month', p_month::timestamp) AS first,
               date_trunc('month', p_month::timestamp) + interval '1 month' AS next
    ), live AS (
        SELECT (minute AT TIME ZONE 'UTC')::date AS day, op_class, sum(msgs) AS msgs
          FROM queen_proxy.usage_minutes, bounds
         WHERE cluster_id = p_cluster AND minute >= first AT TIME ZONE 'UTC' AND minute < next AT TIME ZONE 'UTC'
         GROUP BY 1, 2
    ), rolled AS (
        SELECT day, op_class, msgs FROM queen_proxy.usage_days, bounds
         WHERE cluster_id = p_cluster AND day >= first::date AND day < next::date
    )
    SELECT coalesce(sum(greatest(coalesce(rolled.msgs, 0), coalesce(live.msgs, 0))), 0)::bigint
      FROM live FULL JOIN rolled USING (day, op_class)
$$;
