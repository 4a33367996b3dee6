// Command standin is the programs of ours in the container images that the tests of a container runtime pull: a pod's pause
// container, web servers that look like nginx and httpd from outside, one that tells its effective user, and two that Debian's busybox
// lacks. It does nothing else than these tests look at.
package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// master is how the first process of nginx calls itself.
const master = "nginx: master process nginx -g daemon off;"

func main() {
	if err := run(os.Args, os.Stdout); errors.Is(err, errNone) {
		os.Exit(1)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, "standin:", err)
		os.Exit(1)
	}
}

// run does what the program of that name does. An argument is the port of a web server.
func run(args []string, out io.Writer) error {
	if args[0] == master {
		if err := os.WriteFile("/var/run/nginx.pid", []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
			return err
		}
		return serve(args[1:], out, "nginx")
	}
	switch name := filepath.Base(args[0]); name {
	case "pause":
		return pause()
	case "nginx":
		return syscall.Exec("/proc/self/exe", append([]string{master}, args[1:]...), os.Environ())
	case "httpd":
		return serve(args[1:], out, name)
	case "nnp":
		_, err := fmt.Fprintf(out, "Effective uid: %d\n", os.Geteuid())
		return err
	case "pgrep":
		return pgrep(args[1:], out)
	case "ipcs":
		return ipcs(args[1:], out)
	default:
		return fmt.Errorf("there is no program %q; there are pause, nginx, httpd, nnp, pgrep and ipcs", name)
	}
}

// pause buries the dead of its process namespace until it is told to end.
func pause() error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			break
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
	return nil
}

// serve answers every request with a page until it is told to end.
func serve(args []string, out io.Writer, name string) error {
	port := "80"
	if len(args) > 0 {
		port = args[0]
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%s: %q is no port", name, port)
	}
	fmt.Fprintf(out, "%s: serving on port %s\n", name, port)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	failed := make(chan error, 1)
	go func() {
		failed <- http.ListenAndServe(":"+port, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // tests have no slow clients
			fmt.Fprintf(out, "%s: %s %s\n", name, r.Method, strings.ToValidUTF8(r.URL.Path, "?"))
			fmt.Fprintf(w, "<title>Welcome to %s!</title>\n", name)
		}))
	}()
	select {
	case err := <-failed:
		return err
	case <-signals:
		return nil
	}
}

// errNone is the silent result of a search without a hit.
var errNone = errors.New("none is found")

// pgrep prints the ids of the processes whose name contains the argument.
func pgrep(args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("usage: pgrep NAME")
	}
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return err
	}
	found := false
	for _, file := range names {
		pid := filepath.Base(filepath.Dir(file))
		name, err := os.ReadFile(file)
		if err != nil || pid == strconv.Itoa(os.Getpid()) || !strings.Contains(string(name), args[0]) {
			continue // a process that has ended meanwhile has no name
		}
		found = true
		fmt.Fprintln(out, pid)
	}
	if !found {
		return errNone
	}
	return nil
}

// ipcs prints the segments of shared memory of this IPC namespace.
func ipcs(args []string, out io.Writer) error {
	if !slices.Equal(args, []string{"-m"}) {
		return errors.New("usage: ipcs -m")
	}
	segments, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "key        shmid")
	for _, line := range strings.Split(strings.TrimSpace(string(segments)), "\n")[1:] {
		if f := strings.Fields(line); len(f) > 1 {
			fmt.Fprintf(out, "%-10s %s\n", f[0], f[1])
		}
	}
	return nil
}
