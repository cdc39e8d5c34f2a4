-- Tables of the log engine. Everything is created if absent and nothing is ever dropped or rewritten,
-- so every boot may apply this file to a live database. Statements run one by one, each in a
-- transaction of its own (see queen/db/schema.py).

CREATE SCHEMA IF NOT EXISTS queen;

-- A queue: identity and configuration. Options marked (stored) are echoed and enforce nothing.
CREATE TABLE IF NOT EXISTS queen.queues (
    id                          uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id                   uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    name                        varchar(255) NOT NULL,
    namespace                   varchar(255),
    task                        varchar(255),
    priority                    int DEFAULT 0,          -- (stored)
    lease_time                  int DEFAULT 60,         -- seconds; configure writes 300 when omitted
    retry_limit                 int DEFAULT 3,
    retry_delay                 int DEFAULT 1000,       -- (stored) milliseconds
    ttl                         int DEFAULT 3600,       -- (stored) seconds
    dead_letter_queue           boolean DEFAULT true,   -- either of these two turns dead letters on
    dlq_after_max_retries       boolean DEFAULT true,
    delayed_processing          int DEFAULT 0,          -- seconds
    window_buffer               int DEFAULT 0,          -- seconds
    retention_seconds           int DEFAULT 0,
    completed_retention_seconds int DEFAULT 0,
    retention_enabled           boolean DEFAULT false,
    encryption_enabled          boolean DEFAULT false,
    max_wait_time_seconds       int DEFAULT 0,
    max_queue_size              int DEFAULT 0,          -- (stored)
    min_pop_wait_time           int DEFAULT 0,          -- milliseconds
    dedup_window_seconds        int NOT NULL DEFAULT 3600,
    created_at                  timestamptz DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS queues_tenant_name_uk ON queen.queues (tenant_id, name);

-- A partition: the ordered lane. Its row allocates offsets, and its row lock serialises writers.
CREATE TABLE IF NOT EXISTS queen.log_partitions (
    id             uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    queue_id       uuid NOT NULL REFERENCES queen.queues (id) ON DELETE CASCADE,
    name           text NOT NULL DEFAULT 'Default',
    last_offset    bigint NOT NULL DEFAULT -1,  -- highest offset given out
    log_start      bigint NOT NULL DEFAULT 0,   -- everything below is deleted
    txns_start     bigint NOT NULL DEFAULT 0,   -- every hash row below is purged
    oldest_live_at timestamptz,                 -- created_at of the segment at log_start
    oldest_txn_at  timestamptz,                 -- created_at of the hash row at txns_start
    last_write_at  timestamptz NOT NULL DEFAULT now(),  -- rewritten only when over 1 s old: stays HOT
    created_at     timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS log_partitions_queue_name_uk ON queen.log_partitions (queue_id, name);
CREATE INDEX IF NOT EXISTS idx_log_partitions_queue_write ON queen.log_partitions (queue_id, last_write_at);
ALTER TABLE queen.log_partitions SET (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_log_partitions_oldest_live
    ON queen.log_partitions (queue_id, oldest_live_at) WHERE oldest_live_at IS NOT NULL;
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_log_partitions_oldest_txn
    ON queen.log_partitions (queue_id, oldest_txn_at) WHERE txns_start < log_start;

-- A segment: the messages of one flush, [base_offset, end_offset], as one blob that SQL never opens.
-- The primary key is the only index, since every read is a key range or one backward key step.
CREATE TABLE IF NOT EXISTS queen.log_segments (
    partition_id uuid NOT NULL REFERENCES queen.log_partitions (id) ON DELETE CASCADE,
    base_offset  bigint NOT NULL,
    end_offset   bigint NOT NULL,
    created_at   timestamptz NOT NULL,
    blob         bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset)
);
ALTER TABLE queen.log_segments ALTER COLUMN blob SET STORAGE EXTERNAL;
ALTER TABLE queen.log_segments SET (
    toast_tuple_target = 8160,
    autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_insert_scale_factor = 0.3,
    autovacuum_vacuum_cost_limit = 4000, autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.1, toast.autovacuum_vacuum_insert_scale_factor = 0.3,
    toast.autovacuum_vacuum_cost_limit = 4000, toast.autovacuum_vacuum_cost_delay = 0);

-- The hash sidecar: 16 bytes per message of the segment with the same range, in frame order.
-- Duplicates are found and acks are resolved through it. No foreign key: who deletes a partition
-- deletes these rows too.
CREATE TABLE IF NOT EXISTS queen.log_txns (
    partition_id uuid NOT NULL,
    base_offset  bigint NOT NULL,
    end_offset   bigint NOT NULL,
    created_at   timestamptz NOT NULL,
    hashes       bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset)
);
ALTER TABLE queen.log_txns ALTER COLUMN hashes SET STORAGE EXTERNAL;
ALTER TABLE queen.log_txns SET (
    toast_tuple_target = 8160,
    autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_insert_scale_factor = 0.3,
    autovacuum_vacuum_cost_delay = 0);

-- A cursor: what one consumer group has completed in one partition, and at most one lease.
-- No indexed column is ever updated, so every pop and ack is a HOT update.
CREATE TABLE IF NOT EXISTS queen.log_consumers (
    partition_id      uuid NOT NULL REFERENCES queen.log_partitions (id) ON DELETE CASCADE,
    consumer_group    text NOT NULL DEFAULT '__QUEUE_MODE__',
    committed         bigint NOT NULL DEFAULT -1,
    batch_end         bigint,
    worker_id         text,
    lease_expires_at  timestamptz,
    lease_acquired_at timestamptz,
    lease_conflated   boolean NOT NULL DEFAULT false,
    batch_retry_count int NOT NULL DEFAULT 0,
    attempt_offset    bigint,
    attempt_count     int NOT NULL DEFAULT 0,
    total_consumed    bigint NOT NULL DEFAULT 0,
    created_at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (partition_id, consumer_group)
);
ALTER TABLE queen.log_consumers SET (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);

-- A dead letter: a message one group gave up on. The payload is text, verbatim: jsonb refuses \u0000.
CREATE TABLE IF NOT EXISTS queen.log_dlq (
    id             uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    partition_id   uuid NOT NULL,
    consumer_group text NOT NULL,
    "offset"       bigint NOT NULL,
    message_id     uuid NOT NULL,
    transaction_id text NOT NULL,
    payload        text,
    producer_sub   text,
    encrypted      boolean NOT NULL DEFAULT false,
    error          text,
    retry_count    int DEFAULT 0,
    pushed_at      timestamptz,
    failed_at      timestamptz DEFAULT now()
);
CREATE INDEX IF NOT EXISTS idx_log_dlq_partition_failed_at ON queen.log_dlq (partition_id, failed_at DESC);

-- A registration: the durable subscription of a group, and the mark that its cursors were seeded.
CREATE TABLE IF NOT EXISTS queen.consumer_groups_metadata (
    id                     uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant_id              uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000001',
    consumer_group         text NOT NULL,
    queue_id               uuid REFERENCES queen.queues (id) ON DELETE CASCADE,
    partition_name         text NOT NULL DEFAULT '',
    namespace              text NOT NULL DEFAULT '',
    task                   text NOT NULL DEFAULT '',
    subscription_mode      text NOT NULL,
    subscription_timestamp timestamptz NOT NULL,
    conflation             boolean NOT NULL DEFAULT false,
    created_at             timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS cgm_identity_uk ON queen.consumer_groups_metadata (
    tenant_id, consumer_group, coalesce(queue_id, '00000000-0000-0000-0000-000000000000'::uuid),
    partition_name, namespace, task);
CREATE INDEX IF NOT EXISTS idx_cgm_queue ON queen.consumer_groups_metadata (queue_id);

-- When a group last found a queue empty: lets the candidate scan skip partitions not written since.
CREATE TABLE IF NOT EXISTS queen.consumer_watermarks (
    queue_id           uuid NOT NULL REFERENCES queen.queues (id) ON DELETE CASCADE,
    consumer_group     varchar(255) NOT NULL,
    last_empty_scan_at timestamptz NOT NULL DEFAULT 'epoch',
    updated_at         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_id, consumer_group)
);

-- A repair marker announces that a cursor was moved backwards on purpose: no write tells of it.
CREATE TABLE IF NOT EXISTS queen.hotlist_repairs (
    tenant_id      uuid NOT NULL,
    queue_name     text NOT NULL,
    consumer_group text NOT NULL,
    partition_name text,
    repair_at      timestamptz NOT NULL DEFAULT now(),
    reason         text,
    PRIMARY KEY (tenant_id, queue_name, consumer_group)
);
CREATE INDEX IF NOT EXISTS idx_hotlist_repairs_at ON queen.hotlist_repairs (repair_at);

-- Flags shared by every broker: maintenance_mode, pop_maintenance_mode.
CREATE TABLE IF NOT EXISTS queen.system_state (
    key        text PRIMARY KEY,
    value      jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- Statistics: one row for each queue, namespace, task, and one for all (stat_type 'system', stat_key 'global'). The key of
-- a queue is its id. Rates are those between the last two computations.
CREATE TABLE IF NOT EXISTS queen.stats (
    stat_type               text NOT NULL,
    stat_key                text NOT NULL,
    queue_id                uuid REFERENCES queen.queues (id) ON DELETE CASCADE,
    partition_id            uuid,
    consumer_group          text,
    child_count             bigint NOT NULL DEFAULT 0,  -- partitions; of a namespace or task: queues
    total_messages          bigint NOT NULL DEFAULT 0,
    pending_messages        bigint NOT NULL DEFAULT 0,
    processing_messages     bigint NOT NULL DEFAULT 0,
    completed_messages      bigint NOT NULL DEFAULT 0,
    dead_letter_messages    bigint NOT NULL DEFAULT 0,
    retained_bytes          bigint NOT NULL DEFAULT 0,
    segment_count           bigint NOT NULL DEFAULT 0,
    oldest_pending_at       timestamptz,
    newest_message_at       timestamptz,
    avg_lag_seconds         bigint NOT NULL DEFAULT 0,
    max_lag_seconds         bigint NOT NULL DEFAULT 0,
    median_lag_seconds      bigint NOT NULL DEFAULT 0,
    avg_offset_lag          bigint NOT NULL DEFAULT 0,
    max_offset_lag          bigint NOT NULL DEFAULT 0,
    ingested_per_second     double precision NOT NULL DEFAULT 0,
    processed_per_second    double precision NOT NULL DEFAULT 0,
    prev_total_messages     bigint,
    prev_completed_messages bigint,
    prev_snapshot_at        timestamptz,
    last_computed_at        timestamptz,
    PRIMARY KEY (stat_type, stat_key)
);
CREATE INDEX IF NOT EXISTS idx_stats_queue ON queen.stats (queue_id);
