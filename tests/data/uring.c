/* Opens a file by io_uring, drops a group, and opens it once more, in the same worker; then without io_uring.

   uring PATH UID GID: run as root. Prints the errno of the first opening, how many workers still have the group, the
   errno of the second opening, and that of open(2). Exit status 77: there is no io_uring. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int ring;
static char *sq, *cq;
static struct io_uring_sqe *sqes;
static struct io_uring_params p;

static int open_by_ring(const char *path)
{
	unsigned *tail = (unsigned *)(sq + p.sq_off.tail), mask = *(unsigned *)(sq + p.sq_off.ring_mask);
	unsigned *head = (unsigned *)(cq + p.cq_off.head), cmask = *(unsigned *)(cq + p.cq_off.ring_mask);
	unsigned at = *tail & mask;
	struct io_uring_sqe *sqe = &sqes[at];
	memset(sqe, 0, sizeof *sqe);
	sqe->opcode = IORING_OP_OPENAT;
	sqe->flags = IOSQE_ASYNC;
	sqe->fd = AT_FDCWD;
	sqe->addr = (unsigned long)path;
	sqe->open_flags = O_RDONLY;
	((unsigned *)(sq + p.sq_off.array))[at] = at;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
		exit(77);
	struct io_uring_cqe *cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
	int result = cqes[*head & cmask].res;
	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	if (result >= 0)
		close(result);
	return result < 0 ? -result : 0;
}

static int workers_with(const char *gid)
{
	int found = 0;
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *entry;
	while ((entry = readdir(tasks))) {
		char path[300], line[4096];
		int is_worker = 0;
		snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
		FILE *status = fopen(path, "r");
		while (status && fgets(line, sizeof line, status)) {
			if (!strncmp(line, "Name:\tiou-wrk", 13))
				is_worker = 1;
			if (is_worker && !strncmp(line, "Groups:", 7) && strstr(line, gid))
				found++;
		}
		if (status)
			fclose(status);
	}
	closedir(tasks);
	return found;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	gid_t gid = atoi(argv[3]);
	if (setgroups(1, &gid))
		return 1;
	setfsgid(atoi(argv[2]));
	setfsuid(atoi(argv[2]));
	ring = syscall(SYS_io_uring_setup, 4, &p);
	if (ring < 0)
		return 77;
	sq = mmap(NULL, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE, MAP_SHARED,
		  ring, IORING_OFF_CQ_RING);
	sqes = mmap(NULL, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)sqes == MAP_FAILED)
		return 77;
	int before = open_by_ring(argv[1]);
	if (setgroups(0, NULL))
		return 1;
	int workers = workers_with(argv[3]);
	int after = open_by_ring(argv[1]);
	int fd = open(argv[1], O_RDONLY);
	printf("%d %d %d %d\n", before, workers, after, fd < 0 ? errno : 0);
	return 0;
}
