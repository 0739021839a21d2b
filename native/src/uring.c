/* uring.c: the io_uring backend, by system calls.
 *
 * [Note: empty submission queue] Entries are written and handed to the kernel within one submit or
 * reap. What the kernel did not take (a partial submit, EAGAIN) is taken back by putting the tail
 * where the head is, so the ring never holds an entry that the engine believes unsubmitted. That is
 * allowed because the kernel looks at the tail only inside of our own calls (no SQPOLL).
 *
 * [Note: wake by poll] wake() writes to an eventfd, on which one poll request is in flight whenever
 * the thread sleeps. A poll looks at readiness when it starts, so a wake between two polls is seen.
 *
 * Waiting for several completions at once (min_wait_usec of 6.12) was measured, too: a sixth of the
 * calls at writes, and no less processor time, since a drive's completions come in bursts anyway.
 * IORING_SETUP_DEFER_TASKRUN is not used: what has ended would show only while io_uring_enter
 * works, so that a queue whose ring fails could not tell when the kernel is done with the memory.
 *
 * Registered files were measured and left out: at 2 MiB a transfer, fio took 5.2 ms of processor time
 * per GiB read with them and 4.7 without (both with registered buffers; 7 to 9 without those).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "uring.h"

#ifdef TM_HAVE_URING

#define WAKE_TAG UINT64_MAX /* user_data of the poll; transfers have their slot */

typedef struct {
  int ring_fd, event_fd;
  bool is_polled; /* the poll on event_fd is in flight; of the queue's thread */
  void *rings;    /* both, in one mapping */
  size_t rings_bytes;
  struct io_uring_sqe *entries;
  size_t entries_bytes;
  uint32_t num_entries, mask;
  uint32_t *sq_head, *sq_tail;
  uint32_t *cq_head, *cq_tail, cq_mask;
  struct io_uring_cqe *cqes;
  uring_memory memory;
} uring_state;

static uint32_t load(const uint32_t *shared) { return __atomic_load_n(shared, __ATOMIC_ACQUIRE); }

static void store(uint32_t *shared, uint32_t value) {
  __atomic_store_n(shared, value, __ATOMIC_RELEASE);
}

static int enter(uring_state *state, uint32_t submit, uint32_t wait_for) {
  uint32_t flags = wait_for ? IORING_ENTER_GETEVENTS : 0;
  long done = syscall(SYS_io_uring_enter, state->ring_fd, submit, wait_for, flags, NULL, 0);
  return done < 0 ? -errno : (int)done;
}

/* ---- life cycle -------------------------------------------------------------------------- */

static int setup_call(uint32_t entries, uint32_t flags, struct io_uring_params *params) {
  memset(params, 0, sizeof *params);
  params->flags = flags;
  long fd = syscall(SYS_io_uring_setup, entries, params);
  return fd < 0 ? -errno : (int)fd;
}

/* Kernels refuse flags that they do not know with EINVAL: from the newest set to none. */
static int open_ring(uint32_t entries, struct io_uring_params *params) {
  static const uint32_t wishes[] = {
#ifdef IORING_SETUP_COOP_TASKRUN
      IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL, /* 5.19: no interrupt to wake us up */
#endif
#ifdef IORING_SETUP_SUBMIT_ALL
      IORING_SETUP_SUBMIT_ALL, /* 5.18: a bad entry does not end its batch */
#endif
      0,
  };
  int fd = -EINVAL;
  for (size_t i = 0; i < sizeof wishes / sizeof *wishes && fd == -EINVAL; i++)
    fd = setup_call(entries, wishes[i], params);
  if (fd < 0) return fd;
  uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
  if ((params->features & needed) == needed) return fd;
  close(fd);
  return -ENOSYS;
}

static int map_shared(int fd, size_t length, off_t what, void **out) {
  void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
  if (at == MAP_FAILED) return -errno;
  *out = at;
  return 0;
}

static int map_ring(uring_state *state, const struct io_uring_params *params) {
  size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
  size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
  void *entries = NULL;
  state->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  int rc = map_shared(state->ring_fd, state->rings_bytes, IORING_OFF_SQ_RING, &state->rings);
  if (rc) return rc;
  state->entries_bytes = params->sq_entries * sizeof *state->entries;
  rc = map_shared(state->ring_fd, state->entries_bytes, IORING_OFF_SQES, &entries);
  if (rc) return rc;
  state->entries = entries;
  char *base = state->rings;
  state->num_entries = params->sq_entries;
  state->mask = params->sq_entries - 1;
  state->sq_head = (uint32_t *)(base + params->sq_off.head);
  state->sq_tail = (uint32_t *)(base + params->sq_off.tail);
  state->cq_head = (uint32_t *)(base + params->cq_off.head);
  state->cq_tail = (uint32_t *)(base + params->cq_off.tail);
  state->cq_mask = params->cq_entries - 1;
  state->cqes = (struct io_uring_cqe *)(base + params->cq_off.cqes);
  uint32_t *order = (uint32_t *)(base + params->sq_off.array);
  for (uint32_t i = 0; i < params->sq_entries; i++) order[i] = i;
  return 0;
}

static void uring_release(uring_state *state) {
  if (state->entries) munmap(state->entries, state->entries_bytes);
  if (state->rings) munmap(state->rings, state->rings_bytes);
  if (state->ring_fd >= 0) close(state->ring_fd);
  if (state->event_fd >= 0) close(state->event_fd);
  free(state);
}

static void uring_teardown(void *opaque) {
  uring_state *state = opaque;
  if (state->ring_fd >= 0) tm_uring_memory_close(&state->memory);
  uring_release(state);
}

/* The mappings and descriptors are the child's own copies; the memory's mutex is left as it is. */
static void uring_abandon(void *opaque) {
  uring_state *state = opaque;
  tm_uring_memory_release(&state->memory);
  uring_release(state);
}

static int uring_setup(uint32_t depth, void **out) {
  struct io_uring_params params;
  int rc = -ENOMEM;
  uring_state *state = calloc(1, sizeof *state);
  if (!state) goto out;
  state->ring_fd = state->event_fd = -1;
  rc = open_ring(depth + 1, &params); /* one for the poll; the completion queue is twice as long */
  if (rc < 0) goto out;
  state->ring_fd = rc;
  tm_uring_memory_init(&state->memory, state->ring_fd, params.features);
  rc = map_ring(state, &params);
  if (rc) goto out;
  rc = enter(state, 0, 0); /* a filter may let a ring be made and forbid to use it */
  if (rc < 0) goto out;
  rc = 0;
  state->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (state->event_fd < 0) rc = -errno;
out:
  if (rc && state) uring_teardown(state);
  if (!rc) *out = state;
  return rc;
}

/* ---- submission -------------------------------------------------------------------------- */

static struct io_uring_sqe *next_entry(uring_state *state, uint32_t at) {
  struct io_uring_sqe *entry = &state->entries[(*state->sq_tail + at) & state->mask];
  memset(entry, 0, sizeof *entry);
  return entry;
}

static uint32_t prepare_poll(uring_state *state) {
  if (state->is_polled) return 0;
  struct io_uring_sqe *entry = next_entry(state, 0);
  entry->opcode = IORING_OP_POLL_ADD;
  entry->fd = state->event_fd;
  entry->poll_events = POLLIN;
  entry->user_data = WAKE_TAG;
  return 1;
}

static void prepare_transfer(uring_state *state, uint32_t at, const tm_transfer *transfer) {
  struct io_uring_sqe *entry = next_entry(state, at);
  int buffer = tm_uring_memory_find(&state->memory, transfer);
  bool is_read = transfer->op == TM_OP_READ;
  if (buffer >= 0) {
    entry->opcode = is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    entry->buf_index = (uint16_t)buffer;
  } else {
    entry->opcode = is_read ? IORING_OP_READ : IORING_OP_WRITE;
  }
  entry->fd = transfer->fd;
  entry->off = transfer->offset;
  entry->addr = (uint64_t)(uintptr_t)transfer->buffer;
  entry->len = transfer->length;
  entry->user_data = transfer->slot;
}

/* Hands num prepared entries over, the poll first if there is one; how many transfers were taken. */
static int hand_over(uring_state *state, uint32_t num_polls, uint32_t num, uint32_t wait_for) {
  uint32_t tail = *state->sq_tail;
  store(state->sq_tail, tail + num);
  int rc = enter(state, num, wait_for);
  uint32_t taken = load(state->sq_head) - tail;
  store(state->sq_tail, tail + taken); /* [Note: empty submission queue] */
  if (taken && num_polls) state->is_polled = true;
  if (taken > num_polls) return (int)(taken - num_polls);
  /* EBUSY: completions have to be fetched first, which is what the engine does about EAGAIN. */
  if (rc == -EBUSY) return -EAGAIN;
  return rc < 0 ? rc : 0;
}

static int uring_submit(void *opaque, const tm_transfer *const *transfers, uint32_t count) {
  uring_state *state = opaque;
  uint32_t num_polls = prepare_poll(state), room = state->num_entries - num_polls;
  if (count > room) count = room;
  for (uint32_t i = 0; i < count; i++) prepare_transfer(state, num_polls + i, transfers[i]);
  return hand_over(state, num_polls, num_polls + count, 0);
}

/* ---- completion -------------------------------------------------------------------------- */

static void end_poll(uring_state *state) {
  uint64_t signals;
  state->is_polled = false;
  /* EAGAIN, should the poll have ended by an error: then there is nothing to clear. */
  if (read(state->event_fd, &signals, sizeof signals) < 0) return;
}

static bool fetch(uring_state *state, tm_completion *completions, uint32_t max, int *count) {
  uint32_t head = *state->cq_head, tail = load(state->cq_tail);
  bool any = head != tail;
  for (; head != tail && (uint32_t)*count < max; head++) {
    const struct io_uring_cqe *cqe = &state->cqes[head & state->cq_mask];
    if (cqe->user_data == WAKE_TAG) {
      end_poll(state);
      continue;
    }
    completions[*count].slot = (uint32_t)cqe->user_data;
    completions[*count].result = cqe->res;
    ++*count;
  }
  store(state->cq_head, head);
  return any;
}

static int uring_reap(void *opaque, tm_completion *completions, uint32_t max) {
  uring_state *state = opaque;
  int count = 0;
  if (fetch(state, completions, max, &count)) return count;
  uint32_t num_polls = prepare_poll(state);
  int rc = hand_over(state, num_polls, num_polls, 1);
  fetch(state, completions, max, &count);
  return !count && rc < 0 && rc != -EINTR && rc != -EAGAIN ? rc : count;
}

static uint32_t uring_num_ended(void *opaque) {
  uring_state *state = opaque;
  uint32_t count = 0, tail = load(state->cq_tail);
  for (uint32_t head = *state->cq_head; head != tail; head++)
    if (state->cqes[head & state->cq_mask].user_data != WAKE_TAG) count++;
  return count;
}

static void uring_wake(void *opaque) {
  uring_state *state = opaque;
  uint64_t one = 1;
  ssize_t put;
  do {
    put = write(state->event_fd, &one, sizeof one);
  } while (put < 0 && errno == EINTR);
}

/* ---- memory ------------------------------------------------------------------------------ */

static int uring_add_memory(void *opaque, void *base, uint64_t length) {
  return tm_uring_memory_add(&((uring_state *)opaque)->memory, base, length);
}

static void uring_remove_memory(void *opaque, void *base) {
  tm_uring_memory_remove(&((uring_state *)opaque)->memory, base);
}

static void uring_count_memory(void *opaque, tm_memory_stats *total) {
  tm_uring_memory_count(&((uring_state *)opaque)->memory, total);
}

#else

static int uring_setup(uint32_t depth, void **out) { return -ENOSYS; }

#endif

const tm_backend tm_backend_io_uring = {
    .name = "io_uring",
    .setup = uring_setup, /* where it fails, nothing else is ever called */
#ifdef TM_HAVE_URING
    .submit = uring_submit,
    .reap = uring_reap,
    .wake = uring_wake,
    .num_ended = uring_num_ended,
    .teardown = uring_teardown,
    .abandon = uring_abandon,
    .add_memory = uring_add_memory,
    .remove_memory = uring_remove_memory,
    .count_memory = uring_count_memory,
#endif
};
