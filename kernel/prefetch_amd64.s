//go:build !purego

#include "textflag.h"

// func prefetchLines(address unsafe.Pointer, n int)
TEXT ·prefetchLines(SB), NOSPLIT, $0-16
	MOVQ address+0(FP), AX
	MOVQ n+8(FP), CX

line:
	PREFETCHT0 (AX)
	ADDQ       $64, AX
	SUBQ       $1, CX
	JGT        line
	RET
