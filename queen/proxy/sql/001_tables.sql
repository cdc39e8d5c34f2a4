-- The control plane: who owns which cluster, on which cell, under which plan, and what they used of it.
-- Every file here may also be fed to psql by hand, as often as one likes.

CREATE SCHEMA IF NOT EXISTS queen_proxy;

CREATE TABLE IF NOT EXISTS queen_proxy.schema_migrations (
    name text PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- bcrypt comes from pgcrypto. Without it passwords set in SQL take another form, see 006.
DO $$
BEGIN
    IF EXISTS (SELECT 1 FROM pg_available_extensions WHERE name = 'pgcrypto')
       AND NOT EXISTS (SELECT 1 FROM pg_extension WHERE extname = 'pgcrypto') THEN
        CREATE EXTENSION pgcrypto WITH SCHEMA public;
    END IF;
EXCEPTION
    WHEN insufficient_privilege OR invalid_schema_name OR feature_not_supported THEN
        RAISE NOTICE 'pgcrypto is not installed: %', SQLERRM;
END
$$;

CREATE TABLE IF NOT EXISTS queen_proxy.tenants (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    slug text NOT NULL UNIQUE CHECK (slug ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    name text NOT NULL CHECK (btrim(name) <> ''),
    status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'grace', 'suspended', 'deleting')),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS queen_proxy.users (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id uuid NOT NULL REFERENCES queen_proxy.tenants (id) ON DELETE CASCADE,
    email text NOT NULL UNIQUE CHECK (position('@' IN email) > 0 AND email = lower(email)),
    password_hash text,
    is_operator boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS users_tenant ON queen_proxy.users (tenant_id);

CREATE TABLE IF NOT EXISTS queen_proxy.identities (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    user_id uuid NOT NULL REFERENCES queen_proxy.users (id) ON DELETE CASCADE,
    provider text NOT NULL CHECK (provider IN ('local', 'google', 'github')),
    provider_id text NOT NULL,
    email text,
    verified boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (provider, provider_id)
);
CREATE INDEX IF NOT EXISTS identities_user ON queen_proxy.identities (user_id);

-- A limit that is NULL is no limit.
CREATE TABLE IF NOT EXISTS queen_proxy.plans (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    code text NOT NULL UNIQUE CHECK (code ~ '^[a-z][a-z0-9-]*$'),
    cell_class text NOT NULL CHECK (cell_class IN ('shared', 'dedicated')),
    max_req_per_sec integer CHECK (max_req_per_sec > 0),
    req_burst integer CHECK (req_burst > 0),
    max_msgs_per_sec integer CHECK (max_msgs_per_sec > 0),
    msgs_burst integer CHECK (msgs_burst > 0),
    max_queues integer CHECK (max_queues > 0),
    max_partitions_per_queue integer CHECK (max_partitions_per_queue > 0),
    max_parked_pops integer CHECK (max_parked_pops > 0),
    max_payload_bytes integer CHECK (max_payload_bytes > 0),
    max_batch_items integer CHECK (max_batch_items > 0),
    max_retained_bytes bigint CHECK (max_retained_bytes > 0),
    max_retention_seconds integer CHECK (max_retention_seconds > 0),
    monthly_msgs_quota bigint CHECK (monthly_msgs_quota > 0),
    features jsonb NOT NULL DEFAULT '{"kv": true, "timers": true, "ephemeral": true}'
        CHECK (jsonb_typeof(features) = 'object'),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS queen_proxy.cells (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    slug text NOT NULL UNIQUE CHECK (btrim(slug) <> ''),
    region text NOT NULL CHECK (btrim(region) <> ''),
    base_url text NOT NULL CHECK (btrim(base_url) <> ''),
    class text NOT NULL CHECK (class IN ('shared', 'dedicated')),
    capacity_slots integer NOT NULL DEFAULT 0,
    used_slots integer NOT NULL DEFAULT 0,
    broker_version text,
    status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'draining', 'dead')),
    cell_secret text,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS queen_proxy.clusters (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id uuid NOT NULL REFERENCES queen_proxy.tenants (id) ON DELETE CASCADE,
    cell_id uuid NOT NULL REFERENCES queen_proxy.cells (id) ON DELETE RESTRICT,
    plan_id uuid NOT NULL REFERENCES queen_proxy.plans (id) ON DELETE RESTRICT,
    slug text NOT NULL UNIQUE CHECK (slug ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    broker_tenant_uuid uuid NOT NULL DEFAULT gen_random_uuid(),
    status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'push_blocked', 'suspended', 'deleting')),
    limit_overrides jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(limit_overrides) = 'object'),
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS clusters_tenant ON queen_proxy.clusters (tenant_id);
CREATE INDEX IF NOT EXISTS clusters_cell ON queen_proxy.clusters (cell_id);

CREATE TABLE IF NOT EXISTS queen_proxy.cluster_roles (
    user_id uuid NOT NULL REFERENCES queen_proxy.users (id) ON DELETE CASCADE,
    cluster_id uuid NOT NULL REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE,
    role text NOT NULL CHECK (role IN ('admin', 'producer', 'consumer', 'viewer')),
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (user_id, cluster_id)
);
CREATE INDEX IF NOT EXISTS cluster_roles_cluster ON queen_proxy.cluster_roles (cluster_id);

-- Only the sha256 of a key is kept.
CREATE TABLE IF NOT EXISTS queen_proxy.api_keys (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    cluster_id uuid NOT NULL REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE,
    name text NOT NULL CHECK (btrim(name) <> ''),
    key_hash text NOT NULL UNIQUE CHECK (key_hash ~ '^[0-9a-f]{64}$'),
    scopes text[] NOT NULL CHECK (
        cardinality(scopes) > 0 AND scopes <@ ARRAY['produce', 'consume', 'admin', 'read']),
    created_by uuid REFERENCES queen_proxy.users (id) ON DELETE SET NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    last_used_at timestamptz,
    revoked_at timestamptz
);
CREATE INDEX IF NOT EXISTS api_keys_cluster ON queen_proxy.api_keys (cluster_id);

-- What the proxy knows of a cluster's queues, so that it can count them when the broker is asked for more.
CREATE TABLE IF NOT EXISTS queen_proxy.queues (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    cluster_id uuid NOT NULL REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE,
    name text NOT NULL,
    partitions_count integer NOT NULL DEFAULT 0 CHECK (partitions_count >= 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz
);
CREATE UNIQUE INDEX IF NOT EXISTS queues_live ON queen_proxy.queues (cluster_id, name) WHERE deleted_at IS NULL;

CREATE TABLE IF NOT EXISTS queen_proxy.usage_minutes (
    cluster_id uuid NOT NULL REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE,
    minute timestamptz NOT NULL,
    op_class text NOT NULL CHECK (op_class IN ('push', 'delivery', 'txn', 'configure', 'read')),
    msgs bigint NOT NULL DEFAULT 0 CHECK (msgs >= 0),
    reqs bigint NOT NULL DEFAULT 0 CHECK (reqs >= 0),
    bytes_in bigint NOT NULL DEFAULT 0 CHECK (bytes_in >= 0),
    bytes_out bigint NOT NULL DEFAULT 0 CHECK (bytes_out >= 0),
    PRIMARY KEY (cluster_id, minute, op_class)
);
CREATE INDEX IF NOT EXISTS usage_minutes_minute ON queen_proxy.usage_minutes (minute);

CREATE TABLE IF NOT EXISTS queen_proxy.usage_days (
    cluster_id uuid NOT NULL REFERENCES queen_proxy.clusters (id) ON DELETE CASCADE,
    day date NOT NULL,
    op_class text NOT NULL CHECK (op_class IN ('push', 'delivery', 'txn', 'configure', 'read')),
    msgs bigint NOT NULL DEFAULT 0 CHECK (msgs >= 0),
    reqs bigint NOT NULL DEFAULT 0 CHECK (reqs >= 0),
    bytes_in bigint NOT NULL DEFAULT 0 CHECK (bytes_in >= 0),
    bytes_out bigint NOT NULL DEFAULT 0 CHECK (bytes_out >= 0),
    PRIMARY KEY (cluster_id, day, op_class)
);
CREATE INDEX IF NOT EXISTS usage_days_day ON queen_proxy.usage_days (day);

-- Batches of usage that were counted, so that a batch found in a spool file after a crash counts once.
CREATE TABLE IF NOT EXISTS queen_proxy.usage_batches (
    id uuid PRIMARY KEY,
    counted_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS queen_proxy.operations (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id uuid NOT NULL REFERENCES queen_proxy.tenants (id) ON DELETE RESTRICT,
    cluster_id uuid REFERENCES queen_proxy.clusters (id) ON DELETE SET NULL,
    actor text NOT NULL CHECK (actor IN ('user', 'api_key', 'control_plane', 'system')),
    actor_id uuid,
    action text NOT NULL CHECK (btrim(action) <> ''),
    target text,
    meta jsonb NOT NULL DEFAULT '{}',
    at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS operations_tenant ON queen_proxy.operations (tenant_id, at DESC);
CREATE INDEX IF NOT EXISTS operations_cluster ON queen_proxy.operations (cluster_id, at DESC);

CREATE TABLE IF NOT EXISTS queen_proxy.revoked_tokens (
    jti text PRIMARY KEY,
    expires_at timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS revoked_tokens_expiry ON queen_proxy.revoked_tokens (expires_at);

CREATE TABLE IF NOT EXISTS queen_proxy.outbox (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    kind text NOT NULL CHECK (btrim(kind) <> ''),
    payload jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    consumed_at timestamptz
);
CREATE INDEX IF NOT EXISTS outbox_unconsumed ON queen_proxy.outbox (created_at) WHERE consumed_at IS NULL;

-- A link by which an invited person sets a password, once. Only the sha256 of its token is kept.
CREATE TABLE IF NOT EXISTS queen_proxy.invitations (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    user_id uuid NOT NULL REFERENCES queen_proxy.users (id) ON DELETE CASCADE,
    token_hash text NOT NULL UNIQUE CHECK (token_hash ~ '^[0-9a-f]{64}$'),
    created_by uuid REFERENCES queen_proxy.users (id) ON DELETE SET NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    used_at timestamptz
);
CREATE INDEX IF NOT EXISTS invitations_user ON queen_proxy.invitations (user_id);

-- A cluster with all that decides about its requests: what the proxy keeps in memory.
CREATE OR REPLACE VIEW queen_proxy.resolved_clusters AS
SELECT c.id, c.slug, c.tenant_id, t.slug AS tenant_slug, t.status AS tenant_status, c.status,
       c.broker_tenant_uuid, l.id AS cell_id, l.slug AS cell_slug, l.base_url, l.cell_secret,
       p.code AS plan, p.features, c.limit_overrides,
       jsonb_build_object(
           'max_req_per_sec', p.max_req_per_sec, 'req_burst', p.req_burst,
           'max_msgs_per_sec', p.max_msgs_per_sec, 'msgs_burst', p.msgs_burst,
           'max_queues', p.max_queues, 'max_partitions_per_queue', p.max_partitions_per_queue,
           'max_parked_pops', p.max_parked_pops, 'max_payload_bytes', p.max_payload_bytes,
           'max_batch_items', p.max_batch_items, 'max_retained_bytes', p.max_retained_bytes,
           'max_retention_seconds', p.max_retention_seconds,
           'monthly_msgs_quota', p.monthly_msgs_quota) AS plan_limits
  FROM queen_proxy.clusters c
  JOIN queen_proxy.tenants t ON t.id = c.tenant_id
  JOIN queen_proxy.cells l ON l.id = c.cell_id
  JOIN queen_proxy.plans p ON p.id = c.plan_id;
