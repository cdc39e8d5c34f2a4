-- Tenants, users, clusters and their states. Each function validates, writes, and leaves one audit row;
-- what changes a cluster's requests is announced on the channel queen_proxy_inval at commit.

-- Appends an audit row and announces the cluster, if one is named. Returns the row's id.
CREATE OR REPLACE FUNCTION queen_proxy.record_operation(
    p_tenant_id uuid, p_cluster_id uuid, p_actor text, p_actor_id uuid, p_action text, p_target text, p_meta jsonb
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    v_id uuid;
BEGIN
    IF p_tenant_id IS NULL THEN
        RAISE EXCEPTION 'record_operation: a tenant is required';
    ELSIF p_actor IS NULL OR p_actor NOT IN ('user', 'api_key', 'control_plane', 'system') THEN
        RAISE EXCEPTION 'record_operation: unknown actor %', coalesce(p_actor, 'NULL');
    ELSIF coalesce(btrim(p_action), '') = '' THEN
        RAISE EXCEPTION 'record_operation: an action is required';
    END IF;
    INSERT INTO queen_proxy.operations (tenant_id, cluster_id, actor, actor_id, action, target, meta)
    VALUES (p_tenant_id, p_cluster_id, p_actor, p_actor_id, p_action, p_target, coalesce(p_meta, '{}'))
    RETURNING id INTO v_id;
    IF p_cluster_id IS NOT NULL THEN
        PERFORM pg_notify('queen_proxy_inval', p_cluster_id::text);
    END IF;
    RETURN v_id;
END
$$;

-- The slug lower-cased and trimmed, if it can be a DNS label; raises in the name of the caller otherwise.
CREATE OR REPLACE FUNCTION queen_proxy.checked_slug(p_function text, p_slug text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_slug text := lower(btrim(coalesce(p_slug, '')));
BEGIN
    IF v_slug !~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$' THEN
        RAISE EXCEPTION '%: slug "%" must be a DNS label (a-z, 0-9, inner hyphens, at most 63)',
            p_function, coalesce(p_slug, 'NULL');
    END IF;
    RETURN v_slug;
END
$$;

CREATE OR REPLACE FUNCTION queen_proxy.create_tenant(p_slug text, p_name text) RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    v_slug text := queen_proxy.checked_slug('create_tenant', p_slug);
    v_name text := btrim(coalesce(p_name, ''));
    v_id uuid;
BEGIN
    IF v_name = '' THEN
        RAISE EXCEPTION 'create_tenant: name must not be blank';
    END IF;
    INSERT INTO queen_proxy.tenants (slug, name) VALUES (v_slug, v_name) RETURNING id INTO v_id;
    PERFORM queen_proxy.record_operation(
        v_id, NULL, 'control_plane', NULL, 'tenant_created', v_slug, jsonb_build_object('name', v_name));
    RETURN v_id;
END
$$;

-- A user of a tenant. The hash may be NULL (no password); the provider only goes to the audit row.
CREATE OR REPLACE FUNCTION queen_proxy.create_user(
    p_tenant_id uuid, p_email text, p_password_hash text, p_provider text
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    v_email text := lower(btrim(coalesce(p_email, '')));
    v_id uuid;
BEGIN
    IF position('@' IN v_email) = 0 THEN
        RAISE EXCEPTION 'create_user: email "%" must contain @', coalesce(p_email, 'NULL');
    ELSIF p_provider IS NULL OR p_provider NOT IN ('local', 'google', 'github') THEN
        RAISE EXCEPTION 'create_user: unknown provider %', coalesce(p_provider, 'NULL');
    ELSIF NOT EXISTS (SELECT 1 FROM queen_proxy.tenants WHERE id = p_tenant_id) THEN
        RAISE EXCEPTION 'create_user: unknown tenant %', coalesce(p_tenant_id::text, 'NULL');
    END IF;
    INSERT INTO queen_proxy.users (tenant_id, email, password_hash)
    VALUES (p_tenant_id, v_email, p_password_hash) RETURNING id INTO v_id;
    PERFORM queen_proxy.record_operation(
        p_tenant_id, NULL, 'control_plane', NULL, 'user_created', v_email, jsonb_build_object('provider', p_provider));
    RETURN v_id;
END
$$;

CREATE OR REPLACE FUNCTION queen_proxy.create_cluster(
    p_tenant_id uuid, p_slug text, p_plan_code text, p_cell_id uuid
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    v_slug text := queen_proxy.checked_slug('create_cluster', p_slug);
    v_plan uuid;
    v_id uuid;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM queen_proxy.tenants WHERE id = p_tenant_id) THEN
        RAISE EXCEPTION 'create_cluster: unknown tenant %', coalesce(p_tenant_id::text, 'NULL');
    END IF;
    SELECT id INTO v_plan FROM queen_proxy.plans WHERE code = p_plan_code;
    IF v_plan IS NULL THEN
        RAISE EXCEPTION 'create_cluster: unknown plan %', coalesce(p_plan_code, 'NULL');
    ELSIF NOT EXISTS (SELECT 1 FROM queen_proxy.cells WHERE id = p_cell_id) THEN
        RAISE EXCEPTION 'create_cluster: unknown cell %', coalesce(p_cell_id::text, 'NULL');
    END IF;
    INSERT INTO queen_proxy.clusters (tenant_id, cell_id, plan_id, slug)
    VALUES (p_tenant_id, p_cell_id, v_plan, v_slug) RETURNING id INTO v_id;
    PERFORM queen_proxy.record_operation(
        p_tenant_id, v_id, 'control_plane', NULL, 'cluster_created', v_slug,
        jsonb_build_object('plan', p_plan_code, 'cell_id', p_cell_id));
    RETURN v_id;
END
$$;

CREATE OR REPLACE FUNCTION queen_proxy.assign_plan(p_cluster_id uuid, p_plan_code text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_plan uuid;
    v_tenant uuid;
BEGIN
    SELECT id INTO v_plan FROM queen_proxy.plans WHERE code = p_plan_code;
    IF v_plan IS NULL THEN
        RAISE EXCEPTION 'assign_plan: unknown plan %', coalesce(p_plan_code, 'NULL');
    END IF;
    UPDATE queen_proxy.clusters SET plan_id = v_plan WHERE id = p_cluster_id RETURNING tenant_id INTO v_tenant;
    IF v_tenant IS NULL THEN
        RAISE EXCEPTION 'assign_plan: unknown cluster %', coalesce(p_cluster_id::text, 'NULL');
    END IF;
    PERFORM queen_proxy.record_operation(
        v_tenant, p_cluster_id, 'control_plane', NULL, 'plan_assigned', p_plan_code, '{}');
END
$$;

-- Replaces the overrides of a cluster; NULL or {} clears them. A key is a plan's column name; a number is
-- the limit, JSON null lifts it, and anything else leaves the plan's.
CREATE OR REPLACE FUNCTION queen_proxy.set_limit_override(p_cluster_id uuid, p_overrides jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_overrides jsonb := coalesce(p_overrides, '{}');
    v_tenant uuid;
    v_key text;
BEGIN
    IF jsonb_typeof(v_overrides) = 'null' THEN
        v_overrides := '{}';
    ELSIF jsonb_typeof(v_overrides) <> 'object' THEN
        RAISE EXCEPTION 'set_limit_override: overrides must be an object, not %', jsonb_typeof(v_overrides);
    END IF;
    FOR v_key IN SELECT jsonb_object_keys(v_overrides) LOOP
        IF v_key NOT IN ('max_req_per_sec', 'req_burst', 'max_msgs_per_sec', 'msgs_burst', 'max_queues',
                         'max_partitions_per_queue', 'max_parked_pops', 'max_payload_bytes', 'max_batch_items',
                         'max_retained_bytes', 'max_retention_seconds', 'monthly_msgs_quota') THEN
            RAISE WARNING 'set_limit_override: "%" is no limit and has no effect', v_key;
        END IF;
    END LOOP;
    UPDATE queen_proxy.clusters SET limit_overrides = v_overrides WHERE id = p_cluster_id
    RETURNING tenant_id INTO v_tenant;
    IF v_tenant IS NULL THEN
        RAISE EXCEPTION 'set_limit_override: unknown cluster %', coalesce(p_cluster_id::text, 'NULL');
    END IF;
    PERFORM queen_proxy.record_operation(
        v_tenant, p_cluster_id, 'control_plane', NULL, 'limit_override_set', p_cluster_id::text, v_overrides);
END
$$;

-- One audit row, and one announcement for each cluster of the tenant.
CREATE OR REPLACE FUNCTION queen_proxy.set_tenant_status(p_tenant_id uuid, p_status text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_was text;
BEGIN
    IF p_status IS NULL OR p_status NOT IN ('active', 'grace', 'suspended', 'deleting') THEN
        RAISE EXCEPTION 'set_tenant_status: unknown status %', coalesce(p_status, 'NULL');
    END IF;
    SELECT status INTO v_was FROM queen_proxy.tenants WHERE id = p_tenant_id FOR UPDATE;
    IF v_was IS NULL THEN
        RAISE EXCEPTION 'set_tenant_status: unknown tenant %', coalesce(p_tenant_id::text, 'NULL');
    END IF;
    UPDATE queen_proxy.tenants SET status = p_status WHERE id = p_tenant_id;
    PERFORM queen_proxy.record_operation(
        p_tenant_id, NULL, 'control_plane', NULL, 'tenant_status_changed', p_status,
        jsonb_build_object('from', v_was, 'to', p_status));
    PERFORM pg_notify('queen_proxy_inval', id::text) FROM queen_proxy.clusters WHERE tenant_id = p_tenant_id;
END
$$;

CREATE OR REPLACE FUNCTION queen_proxy.set_cluster_status(p_cluster_id uuid, p_status text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_was text;
    v_tenant uuid;
BEGIN
    IF p_status IS NULL OR p_status NOT IN ('active', 'push_blocked', 'suspended', 'deleting') THEN
        RAISE EXCEPTION 'set_cluster_status: unknown status %', coalesce(p_status, 'NULL');
    END IF;
    SELECT status, tenant_id INTO v_was, v_tenant FROM queen_proxy.clusters WHERE id = p_cluster_id FOR UPDATE;
    IF v_tenant IS NULL THEN
        RAISE EXCEPTION 'set_cluster_status: unknown cluster %', coalesce(p_cluster_id::text, 'NULL');
    END IF;
    UPDATE queen_proxy.clusters SET status = p_status WHERE id = p_cluster_id;
    PERFORM queen_proxy.record_operation(
        v_tenant, p_cluster_id, 'control_plane', NULL, 'cluster_status_changed', p_status,
        jsonb_build_object('from', v_was, 'to', p_status));
END
$$;

-- Cells and plans are edited by hand, so the tables themselves announce it to the clusters concerned.
CREATE OR REPLACE FUNCTION queen_proxy.announce_cell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('queen_proxy_inval', id::text) FROM queen_proxy.clusters WHERE cell_id = NEW.id;
    RETURN NULL;
END
$$;
CREATE OR REPLACE TRIGGER announce AFTER UPDATE ON queen_proxy.cells
    FOR EACH ROW EXECUTE FUNCTION queen_proxy.announce_cell();

CREATE OR REPLACE FUNCTION queen_proxy.announce_plan() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('queen_proxy_inval', id::text) FROM queen_proxy.clusters WHERE plan_id = NEW.id;
    RETURN NULL;
END
$$;
CREATE OR REPLACE TRIGGER announce AFTER UPDATE ON queen_proxy.plans
    FOR EACH ROW EXECUTE FUNCTION queen_proxy.announce_plan();
