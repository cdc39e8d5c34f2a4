-- Removes a tenant and all that refers to a person in it. The messages in the cell's own database are wiped
-- before, by broker_tenant_uuid; the answer is the last record of those ids.
CREATE OR REPLACE FUNCTION queen_proxy.delete_tenant(p_tenant_id uuid, p_force boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_tenant queen_proxy.tenants;
    v_clusters jsonb;
    v_counts jsonb;
    v_revoked integer;
    v_redacted integer;
    v_operations integer;
BEGIN
    IF p_tenant_id IS NULL THEN
        RAISE EXCEPTION 'delete_tenant: a tenant id is required';
    END IF;
    SELECT * INTO v_tenant FROM queen_proxy.tenants WHERE id = p_tenant_id FOR UPDATE;
    IF v_tenant.id IS NULL THEN
        RETURN jsonb_build_object('deleted', false, 'existed', false, 'tenant_id', p_tenant_id);
    ELSIF v_tenant.status <> 'deleting' AND NOT coalesce(p_force, false) THEN
        RAISE EXCEPTION 'delete_tenant: tenant % is %, not deleting: first queen_proxy.set_tenant_status(%, ''deleting''),'
            ' then queen.delete_tenant_data_v1(<broker_tenant_uuid>) for each cluster on the cell''s database',
            v_tenant.slug, v_tenant.status, quote_literal(p_tenant_id);
    END IF;

    SELECT coalesce(jsonb_agg(jsonb_build_object(
               'cluster_id', id, 'slug', slug, 'cell_id', cell_id, 'broker_tenant_uuid', broker_tenant_uuid)
               ORDER BY slug), '[]')
      INTO v_clusters FROM queen_proxy.clusters WHERE tenant_id = p_tenant_id;
    SELECT jsonb_build_object(
               'clusters', (SELECT count(*) FROM queen_proxy.clusters WHERE tenant_id = p_tenant_id),
               'users', (SELECT count(*) FROM queen_proxy.users WHERE tenant_id = p_tenant_id),
               'cluster_roles', (SELECT count(*) FROM queen_proxy.cluster_roles r
                                   JOIN queen_proxy.clusters c ON c.id = r.cluster_id
                                  WHERE c.tenant_id = p_tenant_id),
               'queues', (SELECT count(*) FROM queen_proxy.queues q
                            JOIN queen_proxy.clusters c ON c.id = q.cluster_id WHERE c.tenant_id = p_tenant_id),
               'api_keys', (SELECT count(*) FROM queen_proxy.api_keys k
                              JOIN queen_proxy.clusters c ON c.id = k.cluster_id WHERE c.tenant_id = p_tenant_id))
      INTO v_counts;

    UPDATE queen_proxy.api_keys k SET revoked_at = now() FROM queen_proxy.clusters c
     WHERE c.id = k.cluster_id AND c.tenant_id = p_tenant_id AND k.revoked_at IS NULL;
    GET DIAGNOSTICS v_revoked = ROW_COUNT;
    PERFORM queen_proxy.emit_outbox('tenant_deleted', jsonb_build_object(
        'tenant_id', p_tenant_id, 'tenant_slug', v_tenant.slug, 'status_was', v_tenant.status,
        'forced', coalesce(p_force, false), 'clusters', v_clusters));
    UPDATE queen_proxy.outbox SET payload = payload - 'admin_email'
     WHERE payload ->> 'tenant_id' = p_tenant_id::text AND payload ? 'admin_email';
    GET DIAGNOSTICS v_redacted = ROW_COUNT;
    DELETE FROM queen_proxy.operations WHERE tenant_id = p_tenant_id;
    GET DIAGNOSTICS v_operations = ROW_COUNT;
    PERFORM pg_notify('queen_proxy_inval', id::text) FROM queen_proxy.clusters WHERE tenant_id = p_tenant_id;
    DELETE FROM queen_proxy.tenants WHERE id = p_tenant_id;
    RETURN jsonb_build_object(
        'deleted', true, 'existed', true, 'tenant_id', p_tenant_id, 'tenant_slug', v_tenant.slug,
        'status_was', v_tenant.status, 'forced', coalesce(p_force, false), 'clusters', v_clusters,
        'counts', v_counts || jsonb_build_object(
            'api_keys_revoked', v_revoked, 'operations', v_operations, 'outbox_redacted', v_redacted));
END
$$;
