// Command inkvm runs a program on the machine with KVM; hack/in-kvm.sh calls it. It does not build the machine.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"

	"cocoonstack.io/cocoon/internal/testkit/machine"
)

func main() {
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "in-kvm:", err)
		code = 1
	}
	os.Exit(code)
}

func run() (int, error) {
	if len(os.Args) < 4 {
		return 2, fmt.Errorf("usage: %s CHECKOUT FOLDER PROGRAM [ARGUMENT...]", os.Args[0])
	}
	cpus, err := strconv.Atoi(cmp.Or(os.Getenv("COCOON_KVM_CPUS"), "1"))
	if err != nil {
		return 2, fmt.Errorf("COCOON_KVM_CPUS: %w", err)
	}
	memory, err := strconv.Atoi(cmp.Or(os.Getenv("COCOON_KVM_MEMORY"), "3072"))
	if err != nil {
		return 2, fmt.Errorf("COCOON_KVM_MEMORY: %w", err)
	}
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return 1, fmt.Errorf("QEMU is needed, make setup installs it: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return machine.Exec(ctx, qemu, machine.Program{
		Checkout: os.Args[1], Dir: os.Args[2], Args: os.Args[3:], Env: os.Environ(), CPUs: cpus, Memory: memory, Output: os.Stdout,
	})
}
