/*
 * For user-mode Linux on processors whose extended state is larger than it knows (AMX).
 *
 * Up to Linux 6.1 it sets 2,696 bytes of floating-point state by PTRACE_SETREGSET; the host wants exactly as many as its
 * processor has, and says EFAULT otherwise. Loaded by LD_PRELOAD, this adds what is missing.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define LARGEST (64 * 1024)

/* What user-mode Linux does not know, no program in the guest has touched: it is zero. */
static char whole[LARGEST];
static size_t size;

long ptrace(enum __ptrace_request request, ...)
{
	va_list args;
	va_start(args, request);
	pid_t pid = va_arg(args, pid_t);
	void *addr = va_arg(args, void *);
	void *data = va_arg(args, void *);
	va_end(args);

	/* The system call stores the word; libc's function returns it (ptrace(2), "C library/kernel differences"). */
	if (request >= PTRACE_PEEKTEXT && request <= PTRACE_PEEKUSER) {
		long word;
		return syscall(SYS_ptrace, request, pid, addr, &word) < 0 ? -1 : word;
	}
	if (request == PTRACE_SETREGSET && (long)addr == NT_X86_XSTATE) {
		struct iovec *given = data;
		struct iovec all = {whole, size};
		if (size == 0) {
			all.iov_len = sizeof whole;
			syscall(SYS_ptrace, PTRACE_GETREGSET, pid, addr, &all);
			size = all.iov_len;
			memset(whole, 0, sizeof whole);
		}
		if (given->iov_len < size) {
			memcpy(whole, given->iov_base, given->iov_len);
			data = &all;
		}
	}
	return syscall(SYS_ptrace, request, pid, addr, data);
}
