/*
 * A plugin for qemu that counts the guest's instructions, in user mode and in the kernel, and the bytes that the kernel
 * copies or clears. It writes a line to the file of its argument out=FILE whenever the guest asks for it (mark.c):
 *
 *     NUMBER USER KERNEL COPIED
 *
 * For qemu, each iteration of a repeated string instruction (`rep movs`, `rep stos`) is an instruction, which on a
 * processor moves up to 64 bytes at once. In the kernel, where nearly all of them are, these are therefore not counted
 * as instructions, but by their bytes (COPIED); in user mode, 64 bytes count as one instruction.
 *
 * Debian has no package with qemu's header for plugins; what is used of it is declared here (version 1 of the
 * interface, qemu 7.2).
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { QEMU_PLUGIN_INLINE_ADD_U64 = 0, QEMU_PLUGIN_CB_NO_REGS = 0 };

typedef void (*translate_callback)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*execute_callback)(unsigned int vcpu, void *data);
extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translate_callback);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *counter, uint64_t add);
extern void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, execute_callback, int flags, void *data);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t index);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);

int qemu_plugin_version = 1;

/* What mark.c has the guest do; the last byte of the instruction. */
enum { NEXT = 0, RESET = 1, WRITE = 2 };

/* Instructions are counted in parts of 64, so that a part can stand for one byte of a string instruction. */
enum { PARTS = 64 };

static uint64_t user, kernel, copied;
static unsigned int number;
static FILE *out;

static void marked(unsigned int vcpu, void *what)
{
	(void)vcpu;
	switch ((uintptr_t)what) {
	case NEXT:
		number++;
		break;
	case RESET:
		user = kernel = copied = 0;
		break;
	case WRITE:
		fprintf(out, "%u %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", number, user / PARTS, kernel / PARTS, copied);
		fflush(out);
		break;
	}
}

/* Return how many bytes an iteration of a repeated string instruction is about; 0 for all other instructions. */
static unsigned int bytes_of_iteration(const unsigned char *code, size_t size)
{
	bool is_repeated = false, is_wide = false, is_narrow = false;

	for (size_t i = 0; i < size; i++) {
		unsigned char byte = code[i];
		if (byte == 0xf2 || byte == 0xf3)
			is_repeated = true;
		else if (byte == 0x66)
			is_narrow = true;
		else if ((byte & 0xf0) == 0x40) /* REX; its W bit: 64 bits wide */
			is_wide |= (byte & 0x08) != 0;
		else if ((byte >= 0xa4 && byte <= 0xa7) || (byte >= 0xaa && byte <= 0xaf)) /* movs, cmps, stos, lods, scas */
			return !is_repeated ? 0 : !(byte & 1) ? 1 : is_wide ? 8 : is_narrow ? 2 : 4;
		else
			return 0;
	}
	return 0;
}

static bool is_mark(const unsigned char *code, size_t size)
{
	return size == 8 && !memcmp(code, "\x0f\x1f\x84\x00MAR", 7);
}

/* Called for each block of instructions that qemu translates; what it registers is done whenever the block runs. */
static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
	bool is_kernel = qemu_plugin_tb_vaddr(block) >> 63;
	uint64_t parts = 0, bytes = 0;

	(void)id;
	for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); i++) {
		struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
		const unsigned char *code = qemu_plugin_insn_data(instruction);
		size_t size = qemu_plugin_insn_size(instruction);
		unsigned int moved = bytes_of_iteration(code, size);
		if (!moved)
			parts += PARTS;
		else if (is_kernel)
			bytes += moved;
		else
			parts += moved;
		if (!is_kernel && is_mark(code, size))
			qemu_plugin_register_vcpu_insn_exec_cb(instruction, marked, QEMU_PLUGIN_CB_NO_REGS,
							       (void *)(uintptr_t)code[7]);
	}
	qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, is_kernel ? &kernel : &user, parts);
	if (bytes)
		qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &copied, bytes);
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv)
{
	(void)info;
	for (int i = 0; i < argc; i++)
		if (!strncmp(argv[i], "out=", 4))
			out = fopen(argv[i] + 4, "w");
	if (!out)
		return -1;
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
