-- Onboarding: one call makes a tenant, its cluster, its admin and a first key.

-- A password in the form that is kept. With pgcrypto bcrypt of cost 10; without it
-- $sha256i$<rounds>$<salt>$<digest>, in hex, where digest is sha256(salt || password) and then, rounds - 1
-- times, sha256(digest || password). Either is replaced when the user signs in.
CREATE OR REPLACE FUNCTION queen_proxy.hash_password(p_password text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_rounds constant integer := 50000;
    v_password bytea := convert_to(p_password, 'UTF8');
    v_salt bytea;
    v_digest bytea;
    v_hash text;
BEGIN
    IF to_regprocedure('public.crypt(text,text)') IS NOT NULL
       AND to_regprocedure('public.gen_salt(text,integer)') IS NOT NULL THEN
        EXECUTE 'SELECT public.crypt($1, public.gen_salt(''bf'', 10))' INTO v_hash USING p_password;
        RETURN v_hash;
    END IF;
    v_salt := substring(sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')) FROM 1 FOR 16);
    v_digest := sha256(v_salt || v_password);
    FOR i IN 2 .. v_rounds LOOP
        v_digest := sha256(v_digest || v_password);
    END LOOP;
    RETURN format('$sha256i$%s$%s$%s', v_rounds, encode(v_salt, 'hex'), encode(v_digest, 'hex'));
END
$$;

-- Answers {"api_key","user_id","tenant_id","cluster_id"}. What exists under the same slugs, email and key
-- name is kept as it is, and the key is then null: its plaintext was shown once. Fails as a whole or not at all.
CREATE OR REPLACE FUNCTION queen_proxy.bootstrap_tenant(
    p_tenant_slug text, p_tenant_name text, p_cluster_slug text, p_plan_code text, p_cell uuid,
    p_admin_email text, p_password text DEFAULT NULL, p_key_name text DEFAULT 'default'
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_tenant_slug text := queen_proxy.checked_slug('bootstrap_tenant', p_tenant_slug);
    v_cluster_slug text := queen_proxy.checked_slug('bootstrap_tenant', p_cluster_slug);
    v_email text := lower(btrim(coalesce(p_admin_email, '')));
    v_key_name text := btrim(coalesce(p_key_name, ''));
    v_tenant uuid;
    v_cluster uuid;
    v_user uuid;
    v_owner uuid;
    v_hash text;
    v_key text;
    v_new boolean := false;
BEGIN
    IF p_cell IS NULL OR NOT EXISTS (SELECT 1 FROM queen_proxy.cells WHERE id = p_cell) THEN
        RAISE EXCEPTION 'bootstrap_tenant: unknown cell %', coalesce(p_cell::text, 'NULL (is the cell registered?)');
    ELSIF NOT EXISTS (SELECT 1 FROM queen_proxy.plans WHERE code = p_plan_code) THEN
        RAISE EXCEPTION 'bootstrap_tenant: unknown plan %', coalesce(p_plan_code, 'NULL');
    ELSIF position('@' IN v_email) = 0 THEN
        RAISE EXCEPTION 'bootstrap_tenant: email "%" must contain @', coalesce(p_admin_email, 'NULL');
    ELSIF v_key_name = '' THEN
        RAISE EXCEPTION 'bootstrap_tenant: key name must not be blank';
    END IF;
    -- Two calls at once take turns, so that the second finds what the first made.
    PERFORM pg_advisory_xact_lock(778120020);

    SELECT id INTO v_tenant FROM queen_proxy.tenants WHERE slug = v_tenant_slug;
    IF v_tenant IS NULL THEN
        v_tenant := queen_proxy.create_tenant(v_tenant_slug, coalesce(p_tenant_name, v_tenant_slug));
        v_new := true;
    END IF;

    SELECT id, tenant_id INTO v_cluster, v_owner FROM queen_proxy.clusters WHERE slug = v_cluster_slug;
    IF v_cluster IS NULL THEN
        v_cluster := queen_proxy.create_cluster(v_tenant, v_cluster_slug, p_plan_code, p_cell);
    ELSIF v_owner <> v_tenant THEN
        RAISE EXCEPTION 'bootstrap_tenant: cluster slug % already belongs to tenant %', v_cluster_slug, v_owner;
    END IF;

    SELECT id, tenant_id, password_hash INTO v_user, v_owner, v_hash FROM queen_proxy.users WHERE email = v_email;
    IF v_user IS NULL THEN
        v_hash := CASE WHEN p_password IS NOT NULL THEN queen_proxy.hash_password(p_password) END;
        v_user := queen_proxy.create_user(v_tenant, v_email, v_hash, 'local');
    ELSIF v_owner <> v_tenant THEN
        RAISE EXCEPTION 'bootstrap_tenant: user % already belongs to tenant %', v_email, v_owner;
    ELSIF v_hash IS NULL AND p_password IS NOT NULL THEN
        v_hash := queen_proxy.hash_password(p_password);
        UPDATE queen_proxy.users SET password_hash = v_hash WHERE id = v_user;
    END IF;
    IF v_hash IS NULL AND NOT EXISTS (SELECT 1 FROM queen_proxy.identities WHERE user_id = v_user) THEN
        RAISE WARNING 'bootstrap_tenant: % has neither a password nor a linked identity and cannot sign in', v_email;
    END IF;
    PERFORM queen_proxy.grant_cluster_role(v_cluster, v_email, 'admin');

    IF NOT EXISTS (SELECT 1 FROM queen_proxy.api_keys
                    WHERE cluster_id = v_cluster AND name = v_key_name AND revoked_at IS NULL) THEN
        v_key := 'qk_live_' || rtrim(translate(encode(sha256(convert_to(
            gen_random_uuid()::text || gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')),
            'base64'), '+/', '-_'), '=');
        PERFORM queen_proxy.issue_api_key(
            v_cluster, v_key_name, encode(sha256(convert_to(v_key, 'UTF8')), 'hex'),
            ARRAY['produce', 'consume', 'admin', 'read']);
    END IF;

    PERFORM queen_proxy.record_operation(
        v_tenant, v_cluster, 'control_plane', NULL, 'tenant_bootstrapped', v_tenant_slug,
        jsonb_build_object(
            'tenant_slug', v_tenant_slug, 'cluster_slug', v_cluster_slug, 'plan', p_plan_code,
            'admin_email', v_email, 'key_issued', v_key IS NOT NULL));
    IF v_new THEN
        PERFORM queen_proxy.emit_outbox('tenant_bootstrapped', jsonb_build_object(
            'tenant_id', v_tenant, 'tenant_slug', v_tenant_slug, 'cluster_id', v_cluster,
            'cluster_slug', v_cluster_slug, 'plan', p_plan_code, 'admin_email', v_email));
    END IF;
    RETURN jsonb_build_object(
        'api_key', v_key, 'user_id', v_user, 'tenant_id', v_tenant, 'cluster_id', v_cluster);
END
$$;
