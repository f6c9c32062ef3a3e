// Command init is the first process of the emulated computer. It runs /test with the flags in TEST_FLAGS and its own environment,
// both of which come from the kernel's command line, writes what the test prints and then its exit status to the first serial
// line, and switches the computer off.
package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

func main() {
	for _, m := range [][2]string{{"proc", "/proc"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}} {
		if err := syscall.Mount(m[0], m[1], m[0], 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "init: mount", m[1], err)
		}
	}
	line, err := os.OpenFile("/dev/ttyS0", os.O_WRONLY, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, "init:", err)
		switchOff()
	}
	test := exec.Command("/test", strings.Fields(os.Getenv("TEST_FLAGS"))...)
	test.Stdout, test.Stderr = line, line
	err = test.Run()
	status := test.ProcessState.ExitCode() // -1 if it did not start, or a signal ended it
	if err != nil && status == -1 {
		fmt.Fprintln(line, "init:", err)
	}
	fmt.Fprintf(line, "\nstatus %d\n", status)
	drain(line)
	switchOff()
}

// drain waits until a serial line has sent everything.
func drain(line *os.File) {
	const tcsbrk = 0x5409 // with a nonzero argument: tcdrain
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, line.Fd(), tcsbrk, 1); errno != 0 {
		_, _ = io.WriteString(line, "init: tcdrain: "+errno.Error()+"\n")
	}
}

func switchOff() {
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}
