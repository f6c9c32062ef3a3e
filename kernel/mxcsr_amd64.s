//go:build !purego

#include "textflag.h"

// func loadMXCSR() uint32
TEXT ·loadMXCSR(SB), NOSPLIT, $0-4
	STMXCSR ret+0(FP)
	RET

// func storeMXCSR(word uint32)
TEXT ·storeMXCSR(SB), NOSPLIT, $0-4
	LDMXCSR word+0(FP)
	RET
