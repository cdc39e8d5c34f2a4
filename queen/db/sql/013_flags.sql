-- Flags that every broker obeys, kept in queen.system_state: maintenance_mode, pop_maintenance_mode.

-- The flags that were ever set. One without a row is off.
CREATE OR REPLACE FUNCTION queen.system_flags_v1()
RETURNS TABLE (key text, enabled boolean) LANGUAGE sql STABLE AS $$
    SELECT s.key, coalesce(s.value -> 'enabled' = 'true'::jsonb, false) FROM queen.system_state s
$$;

-- Sets a flag.
CREATE OR REPLACE FUNCTION queen.set_system_flag_v1(p_key text, p_enabled boolean)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO queen.system_state AS s (key, value, updated_at)
    VALUES (p_key, jsonb_build_object('enabled', p_enabled), clock_timestamp())
    ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value, updated_at = EXCLUDED.updated_at
$$;
