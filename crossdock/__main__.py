from crossdock.cli import main

main()
