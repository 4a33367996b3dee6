// Package cocoonguest wires the agent inside a VM: as PID 1 it sets the machine up first, otherwise it runs as an
// ordinary service. It contains no behaviour of its own.
package cocoonguest

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/guestagent"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
	"cocoonstack.io/cocoon/internal/guestagent/launch"
	"cocoonstack.io/cocoon/internal/guestagent/machine"
	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/guestagent/volumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// version identifies the sources of this agent; guest/build.sh sets it.
var version = "unknown"

// buttonGrace is the grace period of the main process after the machine's power button is pressed.
const buttonGrace = 30 * time.Second

// Run is the agent. As PID 1 it does not return: every way to end it powers the machine off.
func Run(ctx context.Context, console io.Writer) error {
	launch.Main() // this may be a copy of the agent that becomes a program
	if os.Getpid() != 1 {
		return serve(ctx, boot.Result{}, nil)
	}
	pressed := boot.CatchCtrlAltDel()
	fmt.Fprintf(console, "cocoon-guest %s\n", version) // for readers of the serial log: the kernel is done, the agent starts
	err := asInit(ctx, pressed)
	if err != nil {
		fmt.Fprintf(console, "cocoon-guest: %v; powering off\n", err)
	}
	machine.PowerOff(nil, nil)
	return err
}

func asInit(ctx context.Context, pressed <-chan os.Signal) error {
	debug.SetGCPercent(-1) // the boot makes no garbage worth collecting
	result, err := boot.Root()
	if err != nil {
		return err
	}
	if err := machine.Loopback(); err != nil {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	return serve(ctx, result, pressed)
}

// serve is the agent of a machine that is set up. pressed, which process 1 has, gets its Ctrl+Alt+Del.
func serve(ctx context.Context, booted boot.Result, pressed <-chan os.Signal) error {
	init := pressed != nil
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dev, err := link.OpenVirtio(link.PortName)
	if errdefs.IsNotFound(err) { // a machine has one of the two
		dev, err = link.OpenVSOCK(vm.AgentPort)
	}
	if err != nil {
		return err
	}
	cfg := guestagent.Config{Version: version, Init: init}
	var srv *guestagent.Server
	var disks func() []*os.File
	if init { // if not PID 1, other programs own the folders
		plug := sync.OnceValue(booted.Plug)
		run := func(ctx context.Context, path string, args ...string) (int, string, error) {
			return srv.RunTool(ctx, path, args...)
		}
		var xfs func() error
		if booted.XFS != nil {
			xfs = sync.OnceValue(booted.XFS)
		}
		keeper := volumes.New(volumes.Machine{HasDisk: booted.Disk != nil, XFS: xfs, Loop: sync.OnceValue(booted.Loop), NFS: sync.OnceValue(booted.NFS), Plug: plug, Run: run, Check: volumes.Checker(booted.Check, run)})
		cfg.Links = sync.OnceValue(booted.Links)
		cfg.Volumes, cfg.Rooms, disks = keeper, rooms.New(booted.Disk, plug), keeper.Disks
	}
	srv = guestagent.New(cfg, machine.New(init, booted.Disk, disks))
	done := make(chan struct{})
	defer func() { <-done }()
	defer cancel()
	go func() {
		defer close(done)
		if booted.Late != nil {
			_ = booted.Late() // the guest works without entropy device, balloon or power button
			var watches sync.WaitGroup
			watches.Go(func() { boot.WatchCPUs(ctx) })
			if init {
				watches.Go(func() { boot.WatchCtrlAltDel(ctx, pressed, func() { srv.PowerButton(buttonGrace) }) })
			}
			boot.WatchPowerButton(ctx, func() { srv.PowerButton(buttonGrace) })
			watches.Wait()
		}
	}()
	debug.SetGCPercent(100)
	return srv.Run(ctx, link.NewPort(dev))
}
