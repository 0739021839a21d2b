/* aio.c: the Linux native AIO backend ("libaio").
 *
 * The four system calls are made directly and libaio.so is not opened: the library adds nothing
 * but their numbers (and changes its soname between distributions), so one path serves everywhere.
 *
 * [Note: one eventfd] Completions signal the same eventfd (IOCB_FLAG_RESFD) that wake() writes to,
 * so a single read() sleeps for both, works on every kernel with AIO, and needs no poll set. The
 * kernel puts an event in the ring before it signals, and read() zeroes the counter before
 * io_getevents looks: a completion is either seen now or makes the next read() return at once.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

/* How the ring in the process's memory begins: part of the kernel's interface since 2.6 (libaio, too,
 * reads it). */
struct aio_ring {
  uint32_t id, nr, head, tail, magic;
};
#define RING_MAGIC 0xa10a10a1u

typedef struct {
  aio_context_t context;
  int event_fd;
  uint32_t depth;
  struct iocb *blocks;    /* by slot */
  struct iocb **batch;    /* scratch of submit */
  struct io_event *events; /* scratch of reap */
} aio_state;

static int aio_setup_call(uint32_t depth, aio_context_t *context) {
  return syscall(SYS_io_setup, depth, context) < 0 ? -errno : 0;
}

static int aio_submit_call(aio_context_t context, long count, struct iocb **blocks) {
  long accepted = syscall(SYS_io_submit, context, count, blocks);
  return accepted < 0 ? -errno : (int)accepted;
}

static int aio_getevents_call(aio_context_t context, long max, struct io_event *events) {
  struct timespec at_once = {0, 0};
  long count = syscall(SYS_io_getevents, context, 0L, max, events, &at_once);
  return count < 0 ? -errno : (int)count;
}

static void aio_release(aio_state *state) {
  if (state->event_fd >= 0) close(state->event_fd);
  free(state->blocks);
  free(state->batch);
  free(state->events);
  free(state);
}

static void aio_destroy(aio_state *state) {
  if (state->context) syscall(SYS_io_destroy, state->context);
  state->context = 0;
}

static void aio_teardown(void *opaque) {
  aio_state *state = opaque;
  aio_destroy(state);
  aio_release(state);
}

static int aio_setup(uint32_t depth, void **out) {
  int rc = -ENOMEM;
  aio_state *state = calloc(1, sizeof *state);
  if (!state) goto out;
  state->event_fd = -1;
  state->depth = depth;
  state->blocks = calloc(depth, sizeof *state->blocks);
  state->batch = calloc(depth, sizeof *state->batch);
  state->events = calloc(depth, sizeof *state->events);
  if (!state->blocks || !state->batch || !state->events) goto out;
  state->event_fd = eventfd(0, EFD_CLOEXEC);
  if (state->event_fd < 0) {
    rc = -errno;
    goto out;
  }
  rc = aio_setup_call(depth, &state->context);
out:
  if (rc && state) aio_teardown(state);
  if (!rc) *out = state;
  return rc;
}

static int aio_submit(void *opaque, const tm_transfer *const *transfers, uint32_t count) {
  aio_state *state = opaque;
  for (uint32_t i = 0; i < count; i++) {
    const tm_transfer *transfer = transfers[i];
    struct iocb *block = &state->blocks[transfer->slot];
    memset(block, 0, sizeof *block);
    block->aio_data = transfer->slot;
    block->aio_lio_opcode = transfer->op == TM_OP_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    block->aio_fildes = (uint32_t)transfer->fd;
    block->aio_buf = (uint64_t)(uintptr_t)transfer->buffer;
    block->aio_nbytes = transfer->length;
    block->aio_offset = (int64_t)transfer->offset;
    block->aio_flags = IOCB_FLAG_RESFD;
    block->aio_resfd = (uint32_t)state->event_fd;
    state->batch[i] = block;
  }
  return aio_submit_call(state->context, count, state->batch);
}

static int aio_reap(void *opaque, tm_completion *completions, uint32_t max) {
  aio_state *state = opaque;
  uint64_t signals;
  ssize_t got = read(state->event_fd, &signals, sizeof signals);
  if (got < 0 && errno != EINTR) return -errno;
  int count = aio_getevents_call(state->context, max < state->depth ? max : state->depth,
                                 state->events);
  if (count == -EINTR) count = 0;
  for (int i = 0; i < count; i++) {
    completions[i].slot = (uint32_t)state->events[i].data;
    completions[i].result = state->events[i].res;
  }
  return count;
}

/* The context's address is that of the ring of completions, which only we take from. Where it is not
 * (an emulated kernel), io_destroy returns when all has ended. */
static uint32_t aio_num_ended(void *opaque) {
  aio_state *state = opaque;
  const struct aio_ring *ring = (const struct aio_ring *)(uintptr_t)state->context;
  if (ring->magic != RING_MAGIC) {
    aio_destroy(state);
    return state->depth;
  }
  uint32_t tail = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE);
  return (tail + ring->nr - ring->head) % ring->nr;
}

static void aio_wake(void *opaque) {
  aio_state *state = opaque;
  uint64_t one = 1;
  ssize_t put;
  do {
    put = write(state->event_fd, &one, sizeof one);
  } while (put < 0 && errno == EINTR);
}

/* The context belongs to the parent's address space: the kernel gave the child none. */
static void aio_abandon(void *opaque) { aio_release(opaque); }

const tm_backend tm_backend_libaio = {
    .name = "libaio",
    .setup = aio_setup,
    .submit = aio_submit,
    .reap = aio_reap,
    .wake = aio_wake,
    .num_ended = aio_num_ended,
    .teardown = aio_teardown,
    .abandon = aio_abandon,
};
