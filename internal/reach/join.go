package reach

import (
	"context"
	"io"
	"net"
)

// Join copies data between a TCP connection and the stream of a caller, until the other end closes the connection or ctx ends. It closes c. An end of
// the stream ends only what is sent.
func Join(ctx context.Context, c net.Conn, stream io.ReadWriter) error {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	go func() { // ends when the caller closes the stream
		_, _ = io.Copy(c, stream)
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
	}()
	_, err := io.Copy(stream, c)
	return err
}
