package kernel

// Control words of the x86 MXCSR register.
const (
	NearestNoFlush = 0x1F80 // the default: round to nearest even, keep denormals, mask every exception
	FlushMask      = 0x8040 // flush results (FTZ) and operands (DAZ) that are denormal
	roundingMask   = 0x6000 // the rounding direction; zero is to nearest
	ControlMask    = 0xE040 // FlushMask and the rounding direction: all that changes a result
)
