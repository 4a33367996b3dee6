// Command server is the HTTP server of the demo image: it shows where it runs and says on stdout who asked.
//
// GET / answers with the host name and the environment, GET /healthz with "ok". It listens on :8080, or on $PORT, and on
// :80 as well where it may. It exits 0 on SIGTERM once the requests under way are answered.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sort"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	port := cmp.Or(os.Getenv("PORT"), "8080")
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", hello)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	listeners, err := listen(port, "80")
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: logged(mux), ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		done <- srv.Shutdown(grace)
	}()
	ended := make(chan error, len(listeners))
	for _, l := range listeners {
		fmt.Println("listening on port", l.Addr().(*net.TCPAddr).Port)
		go func() { ended <- srv.Serve(l) }()
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	err = <-done
	fmt.Println("bye")
	return err
}

// listen opens port, and also the other one unless that is taken or not this user's to open.
func listen(port, also string) ([]net.Listener, error) {
	first, err := net.Listen("tcp", ":"+port)
	if err != nil {
		return nil, err
	}
	second, err := net.Listen("tcp", ":"+also)
	if err != nil {
		return []net.Listener{first}, nil //nolint:nilerr // it is one more way in, and no more than that
	}
	return []net.Listener{first, second}, nil
}

func hello(w http.ResponseWriter, _ *http.Request) {
	host, err := os.Hostname()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	fmt.Fprintf(w, "Hello from %s\n\n", host)
	env := os.Environ()
	sort.Strings(env)
	for _, e := range env {
		fmt.Fprintln(w, e)
	}
}

// logged writes one line a request.
func logged(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		next.ServeHTTP(w, r)
		fmt.Printf("%s %s %q from %s in %s\n", start.UTC().Format(time.RFC3339), r.Method, r.URL.Path, r.RemoteAddr, time.Since(start).Round(time.Microsecond))
	})
}
