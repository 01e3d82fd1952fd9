/*
 * How a program in the guest speaks to the plugin (counts.c): by instructions that do nothing, a `nop` of eight bytes
 * whose last four are "MAR" and what is to be done.
 */
void mark_next(void) { __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, 'M', 'A', 'R', 0"); }
void mark_reset(void) { __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, 'M', 'A', 'R', 1"); }
void mark_write(void) { __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, 'M', 'A', 'R', 2"); }
