// Command standin is the programs of ours in the stand-in images of the conformance run. Debian's busybox has no getent and no
// printenv, its shell drops variables whose names have a dash, and the image of a pod's pause container holds a single program. It does
// nothing else than these four do.
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args[1:]
	if name == "standin" && len(args) > 0 {
		name, args = args[0], args[1:]
	}
	os.Exit(run(name, args, os.Stdout, os.Stderr))
}

func run(name string, args []string, out, errOut io.Writer) int {
	switch name {
	case "pause":
		return pause()
	case "sh":
		fmt.Fprintln(errOut, "sh:", syscall.Exec(shell(os.Environ()), os.Args, os.Environ()))
		return 127
	case "printenv":
		return printenv(args, out)
	case "getent":
		return getent(args, out, errOut)
	}
	fmt.Fprintln(errOut, "usage: pause | sh ... | printenv [NAME...] | getent hosts|ahosts|ahostsv4|ahostsv6 NAME...")
	return 2
}

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)

// shell is busybox, whose messages the tests know, unless it would drop a variable that its programs should have.
func shell(environ []string) string {
	if slices.ContainsFunc(environ, func(pair string) bool { return strings.Contains(pair, "=") && !variable.MatchString(pair) }) {
		return "/bin/bash"
	}
	return "/bin/busybox"
}

// pause waits until it is told to end.
func pause() int {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM)
	<-told
	return 0
}

func printenv(names []string, out io.Writer) int {
	if len(names) == 0 {
		for _, pair := range os.Environ() {
			fmt.Fprintln(out, pair)
		}
		return 0
	}
	status := 0
	for _, name := range names {
		value, ok := os.LookupEnv(name)
		if !ok {
			status = 1
			continue
		}
		fmt.Fprintln(out, value)
	}
	return status
}

// getent looks names up in /etc/hosts and in the DNS, as the C library's does.
func getent(args []string, out, errOut io.Writer) int {
	networks := map[string]string{"hosts": "ip", "ahosts": "ip", "ahostsv4": "ip4", "ahostsv6": "ip6"}
	if len(args) < 2 || networks[args[0]] == "" {
		fmt.Fprintln(errOut, "usage: getent hosts|ahosts|ahostsv4|ahostsv6 NAME...")
		return 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, name := range args[1:] {
		found, err := net.DefaultResolver.LookupIP(ctx, networks[args[0]], name)
		if err != nil || len(found) == 0 {
			return 2
		}
		for _, ip := range found {
			fmt.Fprintf(out, "%-15s %s\n", ip, name)
		}
	}
	return 0
}
