package network_test

import (
	"fmt"

	"cocoonstack.io/cocoon/internal/network"
)

// Guests never reach cloud metadata services unless the operator opens them by name.
func ExampleNewClosed() {
	c, err := network.NewClosed([]string{"10.0.0.0/8"}, []string{"10.1.2.3"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(c.Closed[0], c.Open)
	_, err = network.NewClosed([]string{"ten"}, nil)
	fmt.Println(err != nil)
	// Output:
	// 169.254.0.0/16 [10.1.2.3/32]
	// true
}
