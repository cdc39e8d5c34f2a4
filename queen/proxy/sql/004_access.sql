-- Keys, roles, sessions and operators.

-- A key of a cluster, by its hash: the plaintext never comes here. Returns the key's id.
CREATE OR REPLACE FUNCTION queen_proxy.issue_api_key(
    p_cluster_id uuid, p_name text, p_key_hash text, p_scopes text[]
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
    v_id uuid;
BEGIN
    SELECT tenant_id INTO v_tenant FROM queen_proxy.clusters WHERE id = p_cluster_id;
    IF v_tenant IS NULL THEN
        RAISE EXCEPTION 'issue_api_key: unknown cluster %', coalesce(p_cluster_id::text, 'NULL');
    ELSIF coalesce(btrim(p_name), '') = '' THEN
        RAISE EXCEPTION 'issue_api_key: name must not be blank';
    ELSIF p_key_hash IS NULL OR p_key_hash !~ '^[0-9a-f]{64}$' THEN
        RAISE EXCEPTION 'issue_api_key: key hash must be 64 lower-case hex characters';
    ELSIF coalesce(cardinality(p_scopes), 0) = 0 THEN
        RAISE EXCEPTION 'issue_api_key: at least one scope is required';
    ELSIF NOT p_scopes <@ ARRAY['produce', 'consume', 'admin', 'read'] THEN
        RAISE EXCEPTION 'issue_api_key: unknown scope in %', p_scopes;
    END IF;
    INSERT INTO queen_proxy.api_keys (cluster_id, name, key_hash, scopes)
    VALUES (p_cluster_id, btrim(p_name), p_key_hash, p_scopes) RETURNING id INTO v_id;
    PERFORM queen_proxy.record_operation(
        v_tenant, p_cluster_id, 'control_plane', NULL, 'api_key_issued', v_id::text,
        jsonb_build_object('name', btrim(p_name), 'scopes', to_jsonb(p_scopes)));
    RETURN v_id;
END
$$;

-- Ends a key for good. Looks it up by its id alone: whoever calls for a tenant checks the owner first.
CREATE OR REPLACE FUNCTION queen_proxy.revoke_api_key(p_key_id uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_cluster uuid;
    v_tenant uuid;
    v_name text;
BEGIN
    UPDATE queen_proxy.api_keys SET revoked_at = now() WHERE id = p_key_id AND revoked_at IS NULL
    RETURNING cluster_id, name INTO v_cluster, v_name;
    IF v_cluster IS NULL THEN
        RAISE EXCEPTION 'revoke_api_key: unknown or already revoked key %', coalesce(p_key_id::text, 'NULL');
    END IF;
    SELECT tenant_id INTO v_tenant FROM queen_proxy.clusters WHERE id = v_cluster;
    PERFORM queen_proxy.record_operation(
        v_tenant, v_cluster, 'control_plane', NULL, 'api_key_revoked', p_key_id::text,
        jsonb_build_object('name', v_name));
END
$$;

-- Gives a user a role on a cluster of their own tenant, in place of one they may have.
CREATE OR REPLACE FUNCTION queen_proxy.grant_cluster_role(p_cluster uuid, p_email text, p_role text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_email text := lower(btrim(coalesce(p_email, '')));
    v_user uuid;
    v_tenant uuid;
    v_owner uuid;
BEGIN
    IF p_role IS NULL OR p_role NOT IN ('admin', 'producer', 'consumer', 'viewer') THEN
        RAISE EXCEPTION 'grant_cluster_role: unknown role %', coalesce(p_role, 'NULL');
    END IF;
    SELECT tenant_id INTO v_owner FROM queen_proxy.clusters WHERE id = p_cluster;
    IF v_owner IS NULL THEN
        RAISE EXCEPTION 'grant_cluster_role: unknown cluster %', coalesce(p_cluster::text, 'NULL');
    END IF;
    SELECT id, tenant_id INTO v_user, v_tenant FROM queen_proxy.users WHERE email = v_email;
    IF v_user IS NULL THEN
        RAISE EXCEPTION 'grant_cluster_role: unknown user %', v_email;
    ELSIF v_tenant <> v_owner THEN
        RAISE EXCEPTION 'grant_cluster_role: user % and cluster % belong to different tenants', v_email, p_cluster;
    END IF;
    INSERT INTO queen_proxy.cluster_roles (user_id, cluster_id, role) VALUES (v_user, p_cluster, p_role)
    ON CONFLICT (user_id, cluster_id) DO UPDATE SET role = EXCLUDED.role;
    PERFORM queen_proxy.record_operation(
        v_owner, p_cluster, 'control_plane', NULL, 'cluster_role_granted', v_email,
        jsonb_build_object('role', p_role));
END
$$;

CREATE OR REPLACE FUNCTION queen_proxy.revoke_cluster_role(p_cluster uuid, p_email text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_email text := lower(btrim(coalesce(p_email, '')));
    v_role text;
    v_tenant uuid;
BEGIN
    DELETE FROM queen_proxy.cluster_roles r USING queen_proxy.users u
     WHERE r.cluster_id = p_cluster AND u.id = r.user_id AND u.email = v_email
    RETURNING r.role INTO v_role;
    IF v_role IS NULL THEN
        RAISE EXCEPTION 'revoke_cluster_role: % has no role on cluster %', v_email, coalesce(p_cluster::text, 'NULL');
    END IF;
    SELECT tenant_id INTO v_tenant FROM queen_proxy.clusters WHERE id = p_cluster;
    PERFORM queen_proxy.record_operation(
        v_tenant, p_cluster, 'control_plane', NULL, 'cluster_role_revoked', v_email,
        jsonb_build_object('role', v_role));
END
$$;

-- Puts a session on the deny-list until it would have expired anyway. Repeating it is harmless.
CREATE OR REPLACE FUNCTION queen_proxy.revoke_session(
    p_jti text, p_expires_at timestamptz, p_actor text DEFAULT 'user', p_actor_id uuid DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenant uuid;
    v_new integer;
BEGIN
    IF coalesce(btrim(p_jti), '') = '' THEN
        RAISE EXCEPTION 'revoke_session: jti must not be blank';
    ELSIF p_expires_at IS NULL THEN
        RAISE EXCEPTION 'revoke_session: expiry is required';
    END IF;
    SELECT tenant_id INTO v_tenant FROM queen_proxy.users WHERE id = p_actor_id;
    IF v_tenant IS NULL THEN
        RAISE EXCEPTION 'revoke_session: unknown user %', coalesce(p_actor_id::text, 'NULL');
    END IF;
    INSERT INTO queen_proxy.revoked_tokens (jti, expires_at) VALUES (p_jti, p_expires_at)
    ON CONFLICT (jti) DO NOTHING;
    GET DIAGNOSTICS v_new = ROW_COUNT;
    IF v_new > 0 THEN
        PERFORM queen_proxy.record_operation(
            v_tenant, NULL, p_actor, p_actor_id, 'session_revoked', p_jti, '{}');
    END IF;
END
$$;

-- Forgets revoked sessions that have expired; returns how many.
CREATE OR REPLACE FUNCTION queen_proxy.sweep_revoked_tokens() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_swept integer;
BEGIN
    DELETE FROM queen_proxy.revoked_tokens WHERE expires_at < now();
    GET DIAGNOSTICS v_swept = ROW_COUNT;
    RETURN v_swept;
END
$$;

-- Makes a user an operator of the cell, or ends that. Nothing over HTTP writes this column, on purpose.
CREATE OR REPLACE FUNCTION queen_proxy.set_operator(p_email text, p_enabled boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_email text := lower(btrim(coalesce(p_email, '')));
    v_user uuid;
    v_tenant uuid;
BEGIN
    IF p_enabled IS NULL THEN
        RAISE EXCEPTION 'set_operator: true or false is required';
    END IF;
    UPDATE queen_proxy.users SET is_operator = p_enabled WHERE email = v_email
    RETURNING id, tenant_id INTO v_user, v_tenant;
    IF v_user IS NULL THEN
        RAISE EXCEPTION 'set_operator: unknown user %', v_email;
    END IF;
    PERFORM queen_proxy.record_operation(
        v_tenant, NULL, 'control_plane', NULL,
        CASE WHEN p_enabled THEN 'operator_granted' ELSE 'operator_revoked' END, v_email, '{}');
END
$$;
