/* engine.c: the engine handle: queues, the copy thread, faults, closing, fork. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine.h"

struct tm_engine {
  const tm_backend *backend;
  pid_t pid; /* [Note: fork] threads do not survive fork: in a child every call is -ECHILD */
  pthread_mutex_t mutex; /* adding queues, starting the copier, closing */
  bool closed;           /* under mutex */
  tm_fault_point faults;
  tm_queue *queues[TM_MAX_QUEUES];
  atomic_uint num_queues; /* published after the queue it counts */
  _Atomic(tm_copier *) copier;
  tm_range ranges[TM_MAX_RANGES]; /* registered memory, for queues to come; under mutex */
  tm_memory_stats final_memory;   /* kept by close, which ends the backends' own; under mutex */
};

static bool is_foreign(const tm_engine *engine) { return engine->pid != getpid(); }

static const tm_backend *find_backend(uint32_t backend) {
  switch (backend) {
    case TM_BACKEND_LIBAIO:
      return &tm_backend_libaio;
    case TM_BACKEND_IO_URING:
      return &tm_backend_io_uring;
    case TM_BACKEND_THREADS:
      return &tm_backend_threads;
    default:
      return NULL;
  }
}

static int try_backend(const tm_backend *backend) {
  void *state;
  int rc = backend->setup(1, &state);
  if (!rc) backend->teardown(state);
  return rc;
}

int tm_engine_create(uint32_t backend, tm_engine **out) {
  const tm_backend *found = find_backend(backend);
  if (!found) return -EINVAL;
  int rc = try_backend(found);
  if (rc) return rc;
  tm_engine *engine = calloc(1, sizeof *engine);
  if (!engine) return -ENOMEM;
  engine->backend = found;
  engine->pid = getpid();
  pthread_mutex_init(&engine->mutex, NULL);
  pthread_mutex_init(&engine->faults.mutex, NULL);
  *out = engine;
  return 0;
}

/* Under the mutex. That a range finds no room in one queue costs speed only. */
static void add_known_memory(tm_engine *engine, tm_queue *queue) {
  for (uint32_t i = 0; i < TM_MAX_RANGES; i++) {
    tm_range *range = &engine->ranges[i];
    if (range->base)
      engine->backend->add_memory(tm_queue_backend_state(queue), range->base, range->length);
  }
}

int tm_engine_add_queue(tm_engine *engine, const tm_queue_options *options, uint32_t *queue) {
  int rc = 0;
  if (is_foreign(engine)) return -ECHILD;
  pthread_mutex_lock(&engine->mutex);
  uint32_t num = atomic_load(&engine->num_queues);
  if (engine->closed)
    rc = -ESHUTDOWN;
  else if (num == TM_MAX_QUEUES)
    rc = -ENOSPC;
  else
    rc = tm_queue_create(engine->backend, options, &engine->faults, &engine->queues[num]);
  if (!rc) {
    add_known_memory(engine, engine->queues[num]);
    atomic_store_explicit(&engine->num_queues, num + 1, memory_order_release);
    *queue = num;
  }
  pthread_mutex_unlock(&engine->mutex);
  return rc;
}

static bool is_valid(const tm_io *io) {
  return io->op < TM_NUM_OPS && io->priority < TM_NUM_PRIORITIES &&
         io->offset <= INT64_MAX && io->length <= INT64_MAX - io->offset;
}

/* Makes the requests; those with something to move are in list, in order. */
static int create_requests(uint32_t count, const tm_io *ios, tm_request **out, tm_list *list) {
  for (uint32_t i = 0; i < count; i++) {
    int rc = is_valid(&ios[i]) ? tm_request_create(&ios[i], &out[i]) : -EINVAL;
    if (rc) {
      while (i-- > 0) tm_request_discard(out[i]);
      return rc;
    }
    if (ios[i].length) tm_list_push(list, out[i]);
  }
  return 0;
}

int tm_engine_submit(tm_engine *engine, uint32_t queue, uint32_t count, const tm_io *ios,
                     tm_request **out) {
  tm_list list = {NULL, NULL};
  if (is_foreign(engine)) return -ECHILD;
  if (queue >= atomic_load_explicit(&engine->num_queues, memory_order_acquire)) return -EINVAL;
  int rc = create_requests(count, ios, out, &list);
  if (rc) return rc;
  if (list.head) rc = tm_queue_push(engine->queues[queue], list);
  for (uint32_t i = 0; i < count; i++) {
    if (rc)
      tm_request_discard(out[i]);
    else if (!ios[i].length)
      tm_request_finish(out[i]);
  }
  return rc;
}

int tm_engine_cancel(tm_engine *engine, uint32_t queue) {
  if (is_foreign(engine)) return -ECHILD;
  if (queue >= atomic_load_explicit(&engine->num_queues, memory_order_acquire)) return -EINVAL;
  pthread_mutex_lock(&engine->mutex); /* against close, which ends what is woken */
  bool closed = engine->closed;
  if (!closed) tm_queue_cancel(engine->queues[queue]);
  pthread_mutex_unlock(&engine->mutex);
  return closed ? -ESHUTDOWN : 0;
}

static int start_copier(tm_engine *engine, tm_copier **out) {
  int rc = 0;
  tm_copier *copier = atomic_load_explicit(&engine->copier, memory_order_acquire);
  if (!copier) {
    pthread_mutex_lock(&engine->mutex);
    copier = atomic_load_explicit(&engine->copier, memory_order_relaxed);
    if (engine->closed)
      rc = -ESHUTDOWN;
    else if (!copier)
      rc = tm_copier_create(&copier);
    if (!rc) atomic_store_explicit(&engine->copier, copier, memory_order_release);
    pthread_mutex_unlock(&engine->mutex);
  }
  *out = copier;
  return rc;
}

int tm_engine_copy(tm_engine *engine, void *destination, const void *source, uint64_t length,
                   tm_request **out) {
  tm_copier *copier;
  tm_request *request;
  tm_io io = {.op = TM_OP_WRITE, .fd = -1, .buffer = destination, .length = length};
  if (is_foreign(engine)) return -ECHILD;
  int rc = start_copier(engine, &copier);
  if (rc) return rc;
  rc = tm_request_create(&io, &request);
  if (rc) return rc;
  request->source = source;
  rc = tm_copier_push(copier, request);
  if (rc)
    tm_request_discard(request);
  else
    *out = request;
  return rc;
}

int tm_engine_inject(tm_engine *engine, const tm_fault *fault) {
  if (is_foreign(engine)) return -ECHILD;
  if (fault->op >= TM_NUM_OPS || fault->kind > TM_FAULT_REAP_ERROR || fault->error < 0)
    return -EINVAL;
  bool needs_errno = fault->kind != TM_FAULT_SHORT && fault->kind != TM_FAULT_PARTIAL_SUBMIT;
  if (fault->repeat && needs_errno && !fault->error) return -EINVAL;
  pthread_mutex_lock(&engine->faults.mutex);
  engine->faults.armed = *fault;
  engine->faults.seen = 0;
  pthread_mutex_unlock(&engine->faults.mutex);
  return 0;
}

int tm_engine_get_stats(tm_engine *engine, tm_engine_stats *out) {
  uint32_t num = atomic_load_explicit(&engine->num_queues, memory_order_acquire);
  tm_copier *copier = atomic_load_explicit(&engine->copier, memory_order_acquire);
  *out = (tm_engine_stats){0};
  for (uint32_t i = 0; i < num; i++) tm_counters_add(tm_queue_counters(engine->queues[i]), out);
  if (copier) tm_counters_add(tm_copier_counters(copier), out);
  return 0;
}

int tm_engine_queue_stats(tm_engine *engine, uint32_t queue, tm_engine_stats *out) {
  if (queue >= atomic_load_explicit(&engine->num_queues, memory_order_acquire)) return -EINVAL;
  *out = (tm_engine_stats){0};
  tm_counters_add(tm_queue_counters(engine->queues[queue]), out);
  return 0;
}

int tm_engine_latency(tm_engine *engine, uint32_t queue, uint32_t op, tm_latency *out) {
  if (op >= TM_NUM_OPS ||
      queue >= atomic_load_explicit(&engine->num_queues, memory_order_acquire))
    return -EINVAL;
  tm_histogram_read(tm_queue_latency(engine->queues[queue], op), out);
  return 0;
}

/* ---- memory: see tm_engine_register ------------------------------------------------------ */

static int reserve_range(tm_engine *engine, char *base, uint64_t length) {
  tm_range *found = NULL;
  for (uint32_t i = 0; i < TM_MAX_RANGES; i++) {
    tm_range *range = &engine->ranges[i];
    if (!range->base)
      found = range;
    else if (base < range->base + range->length && range->base < base + length)
      return -EEXIST;
  }
  if (!found) return -ENOSPC;
  *found = (tm_range){base, length};
  return 0;
}

int tm_engine_register(tm_engine *engine, void *base, uint64_t length) {
  if (is_foreign(engine)) return -ECHILD;
  if (!engine->backend->add_memory) return -EOPNOTSUPP;
  if (!base || !length || length > UINTPTR_MAX - (uintptr_t)base) return -EINVAL;
  pthread_mutex_lock(&engine->mutex);
  uint32_t num = atomic_load(&engine->num_queues);
  int rc = engine->closed ? -ESHUTDOWN : reserve_range(engine, base, length);
  for (uint32_t i = 0; i < num && !rc; i++)
    engine->backend->add_memory(tm_queue_backend_state(engine->queues[i]), base, length);
  pthread_mutex_unlock(&engine->mutex);
  return rc;
}

int tm_engine_unregister(tm_engine *engine, void *base) {
  int rc = -ENOENT;
  if (is_foreign(engine)) return -ECHILD;
  pthread_mutex_lock(&engine->mutex);
  uint32_t num = engine->closed ? 0 : atomic_load(&engine->num_queues);
  for (uint32_t i = 0; i < TM_MAX_RANGES && rc; i++) {
    if (!base || engine->ranges[i].base != base) continue;
    engine->ranges[i] = (tm_range){NULL, 0};
    rc = 0;
  }
  for (uint32_t i = 0; i < num && !rc; i++)
    engine->backend->remove_memory(tm_queue_backend_state(engine->queues[i]), base);
  pthread_mutex_unlock(&engine->mutex);
  return rc;
}

/* Under the mutex. */
static void count_memory(tm_engine *engine, tm_memory_stats *out) {
  *out = (tm_memory_stats){0};
  if (!engine->backend->count_memory) return;
  for (uint32_t i = 0; i < atomic_load(&engine->num_queues); i++)
    engine->backend->count_memory(tm_queue_backend_state(engine->queues[i]), out);
}

int tm_engine_memory_stats(tm_engine *engine, tm_memory_stats *out) {
  if (is_foreign(engine)) return -ECHILD;
  pthread_mutex_lock(&engine->mutex);
  if (engine->closed)
    *out = engine->final_memory;
  else
    count_memory(engine, out);
  pthread_mutex_unlock(&engine->mutex);
  return 0;
}

int tm_engine_close(tm_engine *engine) {
  if (is_foreign(engine)) return -ECHILD;
  pthread_mutex_lock(&engine->mutex);
  if (!engine->closed) {
    count_memory(engine, &engine->final_memory);
    engine->final_memory.bytes = 0; /* given back below */
  }
  engine->closed = true;
  uint32_t num = atomic_load(&engine->num_queues);
  tm_copier *copier = atomic_load(&engine->copier);
  for (uint32_t i = 0; i < num; i++) tm_queue_close(engine->queues[i]);
  if (copier) tm_copier_close(copier);
  pthread_mutex_unlock(&engine->mutex);
  return 0;
}

void tm_engine_free(tm_engine *engine) {
  if (!engine) return;
  bool foreign = is_foreign(engine);
  if (!foreign) tm_engine_close(engine); /* a no-op after close */
  uint32_t num = atomic_load(&engine->num_queues);
  tm_copier *copier = atomic_load(&engine->copier);
  for (uint32_t i = 0; i < num; i++)
    (foreign ? tm_queue_abandon : tm_queue_free)(engine->queues[i]);
  if (copier) (foreign ? tm_copier_abandon : tm_copier_free)(copier);
  if (!foreign) {
    pthread_mutex_destroy(&engine->mutex);
    pthread_mutex_destroy(&engine->faults.mutex);
  }
  free(engine);
}
